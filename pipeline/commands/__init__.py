"""The subcommands of `terra-pipeline`, one module each."""
