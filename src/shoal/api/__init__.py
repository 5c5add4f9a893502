"""The public functions, one file per function; `import shoal` has them all."""
