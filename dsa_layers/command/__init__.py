"""The `dsa` command: `main`, the parser of all subcommands, and the modules that run the subcommands. `main` imports a
subcommand's module, and thereby torch, only when this subcommand runs."""
