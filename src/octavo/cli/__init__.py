"""The `octavo` command: one file a subcommand. Parses flags, prints, and calls what does the work."""
