"""Flags, YAML, JSON: every way into the one configuration object."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

import pytest
from sglang.srt.server_args_config_parser import ConfigArgumentMerger

from sglang_dsv4x.config import CONFIG_VARIABLE, ConfigError, Dsv4xConfig, flag_name, load_published
from sglang_dsv4x.engine.server_args import add_flags, config_from_args


@pytest.fixture(autouse=True)
def no_published_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("server", exit_on_error=False)
    made.add_argument("--config")
    add_flags(None, made)
    return made


def parse(*words: str) -> Dsv4xConfig:
    return config_from_args(parser().parse_args(words))


def from_yaml(text: str, folder: Path, *words: str) -> Dsv4xConfig:
    file = folder / "launch.yaml"
    file.write_text(text)
    made = parser()
    merged = ConfigArgumentMerger(made).merge_config_with_args(["--config", str(file), *words])
    return config_from_args(made.parse_args(merged))


def test_every_field_is_a_flag_in_a_group_of_its_own_whose_help_ends_with_the_default() -> None:
    group = next(g for g in parser()._action_groups if g.title == "sglang-dsv4x")
    actions = {action.option_strings[0]: action for action in group._group_actions}
    assert set(actions) == {flag_name(f.name) for f in fields(Dsv4xConfig)}
    for f in fields(Dsv4xConfig):
        if f.name == "enable":
            continue
        text = actions[flag_name(f.name)].help
        assert text is not None
        assert text.endswith(f"(default: {'chosen at start' if f.default is None else f.default})")
        assert len(text) > 60, "a flag says what it does and why its default is what it is"


def test_the_help_text_can_be_printed() -> None:
    text = parser().format_help()
    assert "80 % of" in " ".join(text.split())


def test_without_flags_nothing_is_enabled() -> None:
    assert parse() == Dsv4xConfig()


def test_flags_fill_the_configuration() -> None:
    config = parse(
        *(
            "--enable-dsv4x",
            "--dsv4x-tier",
            "off",
            "--dsv4x-host-memory-gb",
            "1.5",
            "--dsv4x-hot-entries",
            "300",
        ),
        *("--dsv4x-fetch-unit", "8", "--dsv4x-index-dtype", "fp8", "--dsv4x-kernels", "torch"),
        *("--dsv4x-checks", "step", "--dsv4x-yarn-fix", "off"),
    )
    assert config == Dsv4xConfig(
        enable=True,
        tier="off",
        host_memory_gb=1.5,
        hot_entries=300,
        fetch_unit=8,
        index_dtype="fp8",
        kernels="torch",
        checks="step",
        yarn_fix="off",
    )


def test_a_flag_of_ours_without_the_enabling_one_is_an_error_that_names_both() -> None:
    with pytest.raises(ConfigError, match=r"--dsv4x-tier, --dsv4x-fetch-unit.*--enable-dsv4x"):
        parse("--dsv4x-tier", "off", "--dsv4x-fetch-unit", "2")


@pytest.mark.parametrize(
    "words",
    [
        ["--dsv4x-tier"],
        ["--dsv4x-tier", "maybe"],
        ["--dsv4x-fetch-unit", "3"],
        ["--dsv4x-hot-entries", "many"],
        ["--dsv4x-host-memory-gb"],
    ],
)
def test_a_missing_or_impossible_value_is_a_usage_error(words: list[str]) -> None:
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parse("--enable-dsv4x", *words)


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--dsv4x-hot-entries", "0"], "--dsv4x-hot-entries"),
        (["--dsv4x-host-memory-gb", "-1"], "--dsv4x-host-memory-gb"),
        (["--dsv4x-copy-timeout-s", "0"], "--dsv4x-copy-timeout-s"),
        (["--dsv4x-copy-delay-ms", "-1"], "--dsv4x-copy-delay-ms"),
    ],
)
def test_a_number_out_of_range_is_an_error_that_names_the_flag(words: list[str], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        parse("--enable-dsv4x", *words)


def test_yaml_enables_and_configures(tmp_path: Path) -> None:
    text = "enable-dsv4x: true\ndsv4x-hot-entries: 300\ndsv4x-index-dtype: fp8\n"
    assert from_yaml(text, tmp_path) == Dsv4xConfig(enable=True, hot_entries=300, index_dtype="fp8")


@pytest.mark.parametrize(("word", "tier"), [("off", "off"), ("on", "on"), ('"off"', "off")])
def test_a_bare_on_or_off_of_yaml_is_a_word(tmp_path: Path, word: str, tier: str) -> None:
    """YAML reads `dsv4x-tier: off` as false, and SGLang passes that on as the text `false`.

    Without the translation in `_word` this fails as "invalid choice: 'false'".
    """
    text = f"enable-dsv4x: true\ndsv4x-tier: {word}\ndsv4x-checks: off\n"
    config = from_yaml(text, tmp_path)
    assert (config.tier, config.checks) == (tier, "off")


def test_the_command_line_wins_over_yaml(tmp_path: Path) -> None:
    config = from_yaml("enable-dsv4x: true\ndsv4x-fetch-unit: 1\n", tmp_path, "--dsv4x-fetch-unit", "4")
    assert config.fetch_unit == 4


def test_yaml_can_leave_it_off(tmp_path: Path) -> None:
    assert not from_yaml("enable-dsv4x: false\n", tmp_path).enable


def test_json_of_the_environment_configures_and_flags_win_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, '{"enable": true, "fetch_unit": 8, "tier": "off"}')
    assert load_published() == Dsv4xConfig(enable=True, fetch_unit=8, tier="off")
    assert parse("--dsv4x-fetch-unit", "1") == Dsv4xConfig(enable=True, fetch_unit=1, tier="off")


def test_a_configuration_survives_the_way_to_another_process() -> None:
    config = Dsv4xConfig(enable=True, host_memory_gb=0.5, hot_entries=7, fetch_unit=4, copy_delay_ms=2.5)
    assert Dsv4xConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"enabled": true}',
        '{"tier": "sometimes"}',
        '{"enable": "yes"}',
        '{"hot_entries": "many"}',
        '{"hot_entries": 1.5}',
        '{"hot_entries": true}',
        '{"copy_timeout_s": null}',
    ],
)
def test_json_that_is_not_a_configuration_is_an_error_that_names_the_variable(text: str) -> None:
    with pytest.raises(ConfigError, match=f"{CONFIG_VARIABLE}|--dsv4x-tier"):
        Dsv4xConfig.from_json(text)


def test_json_takes_a_whole_number_where_a_fraction_is_allowed() -> None:
    assert Dsv4xConfig.from_json('{"host_memory_gb": 2}').host_memory_gb == 2


def test_the_readme_lists_every_flag_with_its_choices() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    rows = "\n".join(line.split("|")[1] for line in readme.splitlines() if line.startswith("| `--"))
    for f in fields(Dsv4xConfig):
        flag = flag_name(f.name)
        choices = f.metadata.get("choices")
        shown = flag if choices is None else f"{flag} {{{','.join(map(str, choices))}}}"
        assert f"`{shown}`" in rows, f"README's table of flags lacks {shown}"
    assert rows.count("`--") == len(fields(Dsv4xConfig)), "README lists a flag that does not exist"
