"""What passes cost in time on a machine: measured, kept on disk, and told to whoever weighs them."""
