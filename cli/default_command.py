"""A group of commands one of which needs no name: whatever begins with no command's name is for it."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup


class DefaultCommandGroup(TyperGroup):
    """`group NAME …` runs the command of that name, `group …` the hidden one, which nobody can name."""

    def make_context(  # type: ignore[override]  # typer makes contexts of its own class only
        self, info_name: str | None, args: list[str], parent: typer.Context | None = None, **extra: Any
    ) -> typer.Context:
        named = not args or args[0] == "--help" or (args[0] in self.commands and not self.commands[args[0]].hidden)
        make = super().make_context if named else self._hidden.make_context
        return make(info_name, args, parent, **extra)  # type: ignore[return-value]  # as above

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]  # as above
        """The help of the hidden command, then that of the others."""
        of_hidden = self._hidden.make_context(ctx.info_name, [], ctx.parent, resilient_parsing=True)
        self._hidden.format_help(of_hidden, formatter)
        super().format_help(ctx, formatter)

    @property
    def _hidden(self) -> Any:
        return next(command for command in self.commands.values() if command.hidden)
