"""The plug-in in real processes: what it leaves alone, and how a server ends that must not serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from processes import Ended, launch_server, run_python

from sglang_dsv4x.config import CONFIG_VARIABLE

HERE = Path(__file__).parent
WRITES_POOL = (
    "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator._build_token_to_kv_pool_allocator"
)
COMMAND_LINE = "sglang.srt.server_args:ServerArgs.from_cli_args"
PARSING = {
    "sglang.srt.server_args.ServerArgs.add_cli_args",
    "sglang.srt.server_args.ServerArgs.from_cli_args",
}


def changed_upstream(seam: str, where: str) -> dict[str, str]:
    """Environment of a process in whose SGLang `seam` has another signature."""
    return {"PYTHONPATH": str(HERE / "changed_upstream"), "CHANGED_SEAM": seam, "CHANGED_IN": where}


def says(ended: Ended, *words: str) -> None:
    """It ended with an error and these words, and nothing of it runs any more."""
    assert ended.code not in (0, -9, 137), ended.output[-3000:]
    for word in words:
        assert word in ended.output, ended.output[-3000:]
    assert ended.left == []


def after_parsing(model: Path, folder: Path, env: dict[str, str] | None = None) -> dict[str, Any]:
    words = [
        str(HERE / "untouched.py"),
        "--model-path",
        str(model),
        "--random-seed",
        "1",
        "--max-total-tokens",
        "4096",
    ]
    ended = run_python([*words, "--device", "cpu", "--skip-tokenizer-init"], folder, env)
    assert ended.code == 0, ended.output[-3000:]
    line = next(line for line in ended.output.splitlines() if line.startswith("RESULT "))
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return result


def test_without_the_flag_nothing_but_the_command_line_is_touched(model_folder: Path, tmp_path: Path) -> None:
    """Also the resolved arguments and the environment are those of an SGLang that does not load the plug-in."""
    with_plugin = after_parsing(model_folder, tmp_path)
    without = after_parsing(model_folder, tmp_path, {"SGLANG_PLUGINS": "dsv4x_cpu"})
    assert without["changed"] == []
    assert set(with_plugin["changed"]) == PARSING
    assert with_plugin["args"] == without["args"]
    without["environment"].pop("SGLANG_PLUGINS")
    assert with_plugin["environment"] == without["environment"]


def test_a_changed_seam_ends_the_server_before_it_starts_a_process(
    model_folder: Path, tmp_path: Path
) -> None:
    ended = launch_server(
        ["--model-path", str(model_folder), "--enable-dsv4x"],
        tmp_path,
        changed_upstream(WRITES_POOL, "everywhere"),
    )
    says(
        ended,
        "_build_token_to_kv_pool_allocator",
        "expected (self, *, sizes,",
        "found    (self, renamed)",
        "Install sglang==0.5.17, or drop --enable-dsv4x",
    )
    assert "Traceback" not in ended.output


def test_a_seam_changed_only_in_the_scheduler_ends_every_process_of_the_server(
    model_folder: Path, tmp_path: Path
) -> None:
    """SGLang swallows a plug-in's exceptions, and a scheduler that went on would serve stock code."""
    ended = launch_server(
        ["--model-path", str(model_folder), "--enable-dsv4x", "--max-total-tokens", "8192"],
        tmp_path,
        changed_upstream(WRITES_POOL, "children"),
    )
    says(ended, "found    (self, renamed)", "Install sglang==0.5.17, or drop --enable-dsv4x")


def test_a_changed_command_line_is_fatal_only_with_the_flag(model_folder: Path, tmp_path: Path) -> None:
    env = changed_upstream(COMMAND_LINE, "everywhere")
    ended = launch_server(["--model-path", str(model_folder), "--enable-dsv4x"], tmp_path, env)
    says(ended, "ServerArgs.from_cli_args", "found    (self, renamed)", "drop --enable-dsv4x")
    stock = run_python(["-m", "sglang.launch_server", "--help"], tmp_path, env)
    assert stock.code == 0 and "--model-path" in stock.output
    assert "--dsv4x-tier" not in stock.output, "flags that nothing reads are not offered"


def test_a_model_that_is_not_deepseek_v4_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    ended = launch_server(["--model-path", str(llama_folder), "--enable-dsv4x"], tmp_path)
    says(ended, "LlamaForCausalLM", "not DeepseekV4ForCausalLM", "Drop --enable-dsv4x")


def test_a_yaml_file_can_enable_and_what_it_enables_is_checked(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "launch.yaml"
    file.write_text(
        f"model-path: {model_folder}\nenable-dsv4x: true\ndsv4x-tier: off\nenable-mixed-chunk: true\n"
    )
    says(launch_server(["--config", str(file)], tmp_path), "cannot be combined with", "--enable-mixed-chunk")


def test_a_missing_flag_value_ends_with_a_usage_error(model_folder: Path, tmp_path: Path) -> None:
    ended = launch_server(["--model-path", str(model_folder), "--enable-dsv4x", "--dsv4x-tier"], tmp_path)
    says(ended, "argument --dsv4x-tier: expected one argument")
    assert ended.code == 2


ENGINE = """
import sys
from sglang import Engine
if __name__ == "__main__":
    Engine(model_path=sys.argv[1], skip_tokenizer_init=True, load_format="dummy", enable_mixed_chunk=True)
"""


def test_an_engine_is_configured_and_checked_through_the_environment(
    model_folder: Path, tmp_path: Path
) -> None:
    program = tmp_path / "engine.py"
    program.write_text(ENGINE)
    ended = run_python([str(program), str(model_folder)], tmp_path, {CONFIG_VARIABLE: '{"enable": true}'})
    says(ended, "cannot be combined with", "--enable-mixed-chunk")
