"""The `dsa` command: `main`, and a module for each subcommand, which adds its parser and imports torch when it runs."""
