"""The command line."""

from shoal.cli.app import main as main
