"""`python -m cli`: the `sheaf` command for processes that start one another."""

from cli.main import main

main()
