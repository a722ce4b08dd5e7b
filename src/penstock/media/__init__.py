"""Media: columns whose values are files, where such columns come from, and how they are given back."""
