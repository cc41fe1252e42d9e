"""Finds the Lua scripts, one verb a file, in `broker/scripts`."""

from importlib.resources import files


def script_text(verb: str) -> str:
    """The Lua source of a verb."""
    return (files("broker") / "scripts" / f"{verb}.lua").read_text()
