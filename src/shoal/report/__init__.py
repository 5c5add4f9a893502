"""Tables and pictures from records. Nothing here trains, and nothing here imports torch."""
