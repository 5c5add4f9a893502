"""The public functions, one file each; :mod:`shoal` exports them."""
