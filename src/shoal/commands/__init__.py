"""The commands, one file each: what it does in a line, its arguments, and `run`."""
