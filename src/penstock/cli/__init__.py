"""The command line: one file per command. A new command is one file and one line in `main.COMMANDS`."""
