"""Log lines of a real process, in both formats."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import logging, warnings
from telemetry.logs import LineWriter, configure
configure("info", "{fmt}", service="test")
logging.getLogger("here").info("It rains.", extra={{"place": "roof", "nothing": None}})
LineWriter("{fmt}", service="test").write([{{"message": "Job done.", "job_id": name}} for name in "12"])
logging.getLogger("here").debug("Not to be seen.")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("here").exception("It broke.")
warnings.warn("Beware.")
logging.getLogger().setLevel("WARNING")
LineWriter("{fmt}").write([{{"message": "Not to be seen."}}])
"""


def output(fmt: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(fmt=fmt)], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stderr == ""
    assert "Not to be seen" not in done.stdout
    return done.stdout


def test_json_has_one_object_a_line_with_the_same_head() -> None:
    lines = [json.loads(line) for line in output("json").splitlines()]
    assert [line["message"] for line in lines[:4]] == ["It rains.", "Job done.", "Job done.", "It broke."]
    assert all(line.keys() >= {"timestamp", "level", "logger", "service", "message"} for line in lines)
    assert lines[0]["place"] == "roof"
    assert [line["job_id"] for line in lines[1:3]] == ["1", "2"]
    assert "ZeroDivisionError" in lines[3]["exception"]
    assert "Beware." in lines[4]["message"]


def test_text_has_the_fields_behind_the_message() -> None:
    lines = output("text").splitlines()
    assert lines[0].endswith("INFO    It rains. place=roof")
    assert lines[1].endswith("INFO    Job done. job_id=1")
    assert "ZeroDivisionError: division by zero" in lines
