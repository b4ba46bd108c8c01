"""What passes cost in time on a machine: measured, kept on disk, and used by the rules that weigh costs."""
