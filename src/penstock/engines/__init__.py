"""Where tasks run. An engine knows nothing of datasets; a task knows nothing of engines."""
