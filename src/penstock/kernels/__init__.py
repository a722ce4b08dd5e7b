"""Pure array functions: arrays in, arrays out, no I/O."""
