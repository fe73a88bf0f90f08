"""Reports: what is written is what is read, the schema describes it, the page is complete, no turn is dropped."""

from __future__ import annotations

import argparse
import base64
import importlib.util
import json
import re
import struct
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dsv4x.replay import page, pictures, plots, report, report_command, table
from sglang_dsv4x.replay.client import Completion
from sglang_dsv4x.replay.records import Run, TierSample, TurnRecord
from sglang_dsv4x.replay.summary import percentiles, summarise


def record(number: int, completion: Completion | None, **more: object) -> TurnRecord:
    values: dict[str, object] = {
        "conversation": "c",
        "agent": "main",
        "number": number,
        "kind": "tool",
        "prompt_tokens": 1000 * number,
        "prompt_digest": "ab",
        "theoretical_cached": 768 * (number - 1),
        "requested_output": 3,
        "waited_s": 0.0,
        "started_s": 2.0 * number,
        "completion": completion,
        "error_kind": None if completion else "timeout",
        "error": None if completion else "no end within 5 s",
        "tier": {"selected": 4},
    }
    return TurnRecord(**{**values, **more})  # type: ignore[arg-type]


def completion(number: int, **more: object) -> Completion:
    values: dict[str, object] = {
        "output_ids": (1, 2, 3),
        "logprobs": (-0.1, -1 / 3, -2e-17),
        "cached_tokens": 512 * (number - 1),
        "finish_reason": "length",
        "ttft_s": 0.1 * number,
        "gaps_s": (0.01, 0.02),
        "latency_s": 0.1 * number + 0.03,
        "output_tokens": 3,
        "prompt_tokens": 1000 * number,
    }
    return Completion(**{**values, **more})  # type: ignore[arg-type]


def run_of(*records: TurnRecord, **more: object) -> Run:
    values: dict[str, object] = {
        "planned_turns": len(records),
        "concurrency": 1,
        "page_size": 256,
        "settings": {"seed": 0},
        "server": {"api": "sglang", "version": "0"},
        "name": "one",
        "base_url": "http://x",
        "records": list(records),
        "tier": {"selected": 8, "hits": 2, "bytes_to_device": 2**20, "bytes_to_host": 2**19},
        "tier_samples": [TierSample(1.5, {"bytes_to_device": 2**20, "bytes_to_host": 2**19})],
        "wall_s": 9.5,
    }
    return Run(**{**values, **more})  # type: ignore[arg-type]


RUN = run_of(
    record(1, completion(1)),
    record(2, completion(2), retried=("http", "connection")),
    record(3, None, retried=("timeout",)),
    record(4, completion(4, cached_tokens=None, output_ids=None, logprobs=None, text_digest="ff")),
    planned_turns=6,
    partial="interrupted",
    resumed_s=[3.0],
)


def test_what_is_written_is_what_is_read(tmp_path: Path):
    path = tmp_path / "r.json"
    report.write_json([RUN, replace(RUN, name="two")], ["x"], path)
    first, second = report.read_json(path)
    assert first == RUN and second == replace(RUN, name="two")
    assert [x.hex() for x in first.records[0].completion.logprobs] == [
        x.hex() for x in (-0.1, -1 / 3, -2e-17)
    ]


numbers = st.floats(0, 1e6, allow_nan=False)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.none(),
            st.builds(
                completion,
                st.integers(1, 9),
                ttft_s=numbers,
                gaps_s=st.lists(numbers, max_size=5).map(tuple),
                cached_tokens=st.none() | st.integers(0, 5000),
                gaps_exact=st.booleans(),
                prompt_tokens=st.none() | st.integers(1, 5000),
            ),
        ),
        max_size=12,
    )
)
def test_any_run_survives_the_report_and_counts_every_turn_once(tmp_path_factory, completions):
    path = tmp_path_factory.mktemp("reports") / "r.json"
    run = run_of(*(record(i + 1, c) for i, c in enumerate(completions)), planned_turns=15)
    report.write_json([run], ["x"], path)
    [read] = report.read_json(path)
    assert read == run
    jsonschema.validate(json.loads(path.read_text()), report.json_schema())
    total = summarise(run)
    assert total.turns + total.failed + total.not_sent == 15
    if total.turns:
        assert total.ttft_s and total.ttft_s.samples == total.turns == total.latency_s.samples
        assert (total.gap_s.samples if total.gap_s else 0) == sum(len(c.gaps_s) for c in completions if c)
    assert f"of {run.planned_turns} planned" in table.render(run)


def test_percentiles_are_those_of_numpy_over_the_whole_sample():
    found = percentiles([float(i) for i in range(101)])
    assert found and (found.p50, found.p95, found.p99, found.mean, found.samples) == (50, 95, 99, 50, 101)
    assert percentiles([]) is None


def test_what_weakens_a_number_is_said():
    text = table.render(RUN)
    for words in (
        "3 answered, 1 failed (1 timeout), 3 (1 connection, 1 http, 1 timeout) retries, of 6 planned",
        "PARTIAL: interrupted after 4 of 6 turns",
        "over the 3 answered turns; 1 failed ones are in none of them",
        "1 turns came without the number of cached tokens",
        "Taken up again at 3 s",
        "Times of a turn that was retried are those of its last attempt",
        "(over 3 turns)",
        "(over 6 gaps)",
    ):
        assert words in text, words
    assert "17.1 % of prompt tokens" in text.replace("  ", " "), (
        "512 of the 3,000 tokens whose hits are known"
    )


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda v: v.update(kind="other"), "kind: must be 'sglang-dsv4x replay'"),
        (lambda v: v.update(schema=1), "schema: is 1; this version reads 2"),
        (lambda v: v.update(runs=[]), "runs: List should have at least 1 item"),
        (lambda v: v["runs"][0]["turns"][1].update(prompt_tokens="many"), "runs.0.turns.1.prompt_tokens"),
        (lambda v: v["runs"][0].pop("server"), "runs.0.server: Field required"),
        (lambda v: v["runs"][0]["turns"][0].update(ttft_s=float("nan")), "runs.0.turns.0.ttft_s"),
    ],
)
def test_what_is_not_a_report_is_refused_with_file_and_field(tmp_path: Path, break_it, words: str):
    value = report.as_json([RUN], ["x"])
    break_it(value)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(value))
    with pytest.raises(report.ReportError) as error:
        report.read_json(path)
    assert str(error.value).startswith(f"{path}: ") and words in str(error.value)


class Page(HTMLParser):
    """Everything that a page would load, and whether its tags are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(text: str) -> Page:
    found = Page()
    found.feed(text)
    assert found.open == []
    return found


def test_the_page_is_one_file_with_every_plot_and_no_script():
    text = page.render([RUN, replace(RUN, name="two")])
    found = parsed(text)
    assert found.scripts == 0 and len(found.sources) == 6
    for source in found.sources:
        head, _, data = source.partition(",")
        svg = base64.b64decode(data).decode()
        assert head == "data:image/svg+xml;base64" and "<svg" in svg and len(svg) > 5000
    assert "default-src 'none'" in text and "PARTIAL: interrupted" in text
    assert "Failed turns (2)" in text and "no end within 5 s" in text
    assert not re.search(r"https?://(?!x\b|www\.w3\.org)", text.replace("&#x27;", "'"))


def test_names_and_messages_of_others_are_text_and_no_markup():
    evil = "<script>alert(1)</script>$\\frac{$"
    hostile = run_of(
        record(1, completion(1), conversation=evil, agent=evil),
        record(2, None, conversation=evil, error=evil),
        name=evil,
        server={"api": evil},
        partial=evil,
    )
    text = page.render([hostile])
    assert parsed(text).scripts == 0 and "&lt;script&gt;alert(1)" in text
    assert plots.png([hostile])[:4] == b"\x89PNG"


def test_a_run_of_nothing_and_one_of_very_many_turns_can_be_shown():
    nothing = run_of(record(1, None), tier=None, tier_samples=[])
    assert "no server" not in parsed(page.render([nothing])).sources and plots.png([nothing])
    many = run_of(*(record(i % 600 + 1, completion(3), conversation=f"c{i // 600}") for i in range(6000)))
    text = page.render([many])
    assert "the first 2,000 of them (6,000)" in text and len(text) < 3_000_000


def test_the_picture_is_a_png_of_a_size_to_read():
    data = plots.png([RUN, replace(RUN, name="two")])
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert 1000 < width < 1400 and 600 < height < 1600


def command(*words: object) -> int:
    parser = argparse.ArgumentParser()
    report_command.add_arguments(parser)
    return report_command.run(parser.parse_args([str(word) for word in words]))


def test_the_report_command_compares_runs_of_several_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    faster = run_of(record(1, completion(1, ttft_s=0.05)), name="server")
    report.write_json([replace(faster, records=[record(1, completion(1))])], ["x"], tmp_path / "before.json")
    report.write_json([faster], ["x"], tmp_path / "after.json")
    html, png = tmp_path / "o.html", tmp_path / "o.png"
    assert command(tmp_path / "before.json", tmp_path / "after.json", "--html", html, "--png", png) == 0
    text = capsys.readouterr().out
    assert re.search(r"TTFT p50, ms\s+100\.0\s+50\.0  x0\.50", text)
    assert re.search(r"^\s+before\s+after$", text, re.M)
    assert "before and after: 1 of 1 turns equal, 3 of 3 tokens equal" in text
    assert "before, after" in html.read_text() and png.read_bytes()[:4] == b"\x89PNG"
    report.write_json([RUN, replace(RUN, name="two")], ["x"], tmp_path / "both.json")
    assert command(tmp_path / "both.json", tmp_path / "after.json", tmp_path / "after.json") == 0
    assert re.search(r"both/one\s+both/two\s+after\s+after#2", capsys.readouterr().out)


def test_the_report_command_prints_its_schema_and_refuses_what_is_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert command("--schema") == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    turn = schema["$defs"]["TurnRow"]["properties"]
    assert "seconds" in turn["ttft_s"]["description"]
    (tmp_path / "x.json").write_text("[]")
    assert command() == command(tmp_path / "x.json") == command(tmp_path / "missing.json") == 2
    assert "missing.json: cannot be read: No such file" in capsys.readouterr().err


def test_without_matplotlib_the_flag_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    report.write_json([RUN], ["x"], tmp_path / "r.json")
    assert command(tmp_path / "r.json", "--png", tmp_path / "o.png") == 2
    assert "pip install 'sglang-dsv4x[plot]'" in capsys.readouterr().err
    with pytest.raises(pictures.PicturesError):
        pictures.check_pictures()
