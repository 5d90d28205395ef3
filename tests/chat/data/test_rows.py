"""Rows: every format from every kind of file, and what is wrong is said with its place."""

import json
import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest

from colossalai.chat.data import ChatRow, chat_data
from tests.chat.data.setups import HUMAN, ROWS, chat, write_lines

pytestmark = pytest.mark.unit

SFT = {"prompt": "3+4=", "completion": "7"}


@pytest.mark.parametrize(("row", "stage", "name"), ROWS.values(), ids=list(ROWS))
def test_formats_are_recognized_in_both_kinds_of_file(row, stage, name, tmp_path):
    row = row | {"extra": [1, {"deep": True}]}
    listed = tmp_path / "list.json"
    listed.write_text("\n " + json.dumps([row, row], indent=1))
    lines = write_lines(tmp_path / "lines.json", [row, row])
    for source in (listed, str(lines), [row, row]):
        for asked in (None, stage):
            data = chat_data(source, asked)
            assert (data.stage, data.format, len(data)) == (stage, name, 2)
            assert [dict(each) for each in data] == [row, row]
    assert data[0:1] == (data[0],)
    assert "2 rows" in repr(data)


@pytest.mark.parametrize(
    ("row", "stage"),
    [
        (SFT, "prompts"),
        ({"messages": chat("3+4?", "7")}, "prompts"),
        ({"instruction": "add", "output": "7"}, "prompts"),
        ({"prompt": "a", "completion": "b", "chosen": "c", "rejected": "d"}, "sft"),
    ],
    ids=["completion", "messages", "alpaca", "all"],
)
def test_the_stage_decides_where_keys_do_not(row, stage):
    assert chat_data([row]).stage != stage
    assert chat_data([row], stage).stage == stage


def test_a_column_without_a_value_is_none():
    row = {"prompt": "3+4=", "completion": None, "chosen": None, "rejected": None}
    assert chat_data([row]).stage == "prompts"
    assert chat_data([{"instruction": "add", "input": None, "output": "7"}]).format == "alpaca"


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x0b", "\x1c"])
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "BOM"])
def test_marks_and_line_ends_change_no_row(mark, end, separator, tmp_path):
    rows = [{"prompt": f"一行{separator}二行\ufeff", "completion": "对\r\n"}] * 3
    found = chat_data(write_lines(tmp_path / "rows.jsonl", rows, end=end, mark=mark))
    assert [dict(row) for row in found] == rows
    assert [row.place for row in found] == [f"{tmp_path}/rows.jsonl:{line}" for line in (1, 2, 3)]
    listed = tmp_path / "rows.json"
    listed.write_bytes((mark + json.dumps(rows, ensure_ascii=False, indent=1).replace("\n", end)).encode())
    assert [dict(row) for row in chat_data(listed)] == rows


def test_empty_lines_are_passed_over_and_counted(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(f"\n{json.dumps(SFT)}\n  \n{json.dumps(SFT)}")
    assert [row.place for row in chat_data(file)] == [f"{file}:2", f"{file}:4"]


def test_max_size_reads_no_further(tmp_path):
    file = write_lines(tmp_path / "rows.jsonl", [SFT, SFT, {"prompt": 1}])
    assert len(chat_data(file, max_size=2)) == 2
    with pytest.raises(ValueError, match="max_size=0"):
        chat_data(file, max_size=0)


def test_rows_cannot_be_changed():
    given = dict(SFT)
    (row,) = chat_data([given])
    with pytest.raises(TypeError):
        row["prompt"] = "5"
    given["prompt"] = "5"
    assert row["prompt"] == "3+4="
    assert isinstance(row, ChatRow)
    assert pickle.loads(pickle.dumps(row)) == row == SFT


# name: (second row of the file, what is said of it)
WRONG = {
    "keys": ({"question": "3+4="}, r"'prompt', 'completion' missing among the keys \['question'\]; expected"),
    "one key": ({"prompt": "3+4=", "output": "7"}, "'completion' missing"),
    "number": ({"prompt": "3+4=", "completion": 7}, "'completion' is int 7; expected a text"),
    "no object": (["3+4=", "7"], "a row is an object with keys, and this is list"),
    "half a character": ({"prompt": "a\ud83d", "completion": "7"}, "character 1 of 'prompt' is half"),
}


@pytest.mark.parametrize(("row", "message"), WRONG.values(), ids=list(WRONG))
def test_a_wrong_row_is_named_with_its_line_or_number(row, message, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in (SFT, row)))
    with pytest.raises(ValueError, match=rf"rows.jsonl:2: .*{message}"):
        chat_data(file)
    file.write_text(json.dumps([SFT, row]))
    with pytest.raises(ValueError, match=rf"rows.jsonl, row 1 \(the first is 0\): .*{message}"):
        chat_data(file)
    with pytest.raises(ValueError, match=rf"row 1 \(the first is 0\): .*{message}"):
        chat_data([SFT, row])


USER = {"role": "user", "content": "3+4?"}
# name: (the only row, its stage, what is said of it)
WRONG_FIRST = {
    "unknown": (
        {"question": "a"},
        None,
        r"the keys \['question'\] fit no format; expected one of \{prompt, ch",
    ),
    "other stage": (SFT, "preference", r"fit no format of stage 'preference'; .*\(dialogue_pair\)"),
    "number chosen": ({"prompt": "a", "chosen": 7, "rejected": "8"}, None, "'chosen' is int 7; expected a t"),
    "input": ({"instruction": "a", "input": 3, "output": "b"}, None, "'input' is int 3"),
    "no messages": ({"messages": []}, None, r"'messages' is list \[\]; expected a list of at least one"),
    "text as messages": ({"messages": "hello"}, None, "'messages' is str 'hello'; expected a list"),
    "text in messages": ({"messages": ["hello"]}, None, r"messages\[0\] is str 'hello'; expected \{role"),
    "no role": ({"messages": [{"content": "a"}]}, None, r"messages\[0\] has NoneType None as its 'role'"),
    "no content": (
        {"messages": [{"role": "user"}]},
        None,
        r"messages\[0\] has NoneType None as its 'content'",
    ),
    "no answer": ({"messages": [USER]}, None, "no message of 'messages' with role 'assistant'"),
    "asked nothing": ({"messages": chat("a", "b")[1:]}, None, "begins with the assistant"),
    "no question": ({"messages": chat("a", "b")[1:]}, "prompts", "the assistant's turns only"),
    "no Assistant": ({"chosen": "hello", "rejected": "hello you"}, None, "share no beginning up to"),
    "other questions": ({"chosen": HUMAN, "rejected": "\n\nHuman: a\n\nAssistant:"}, None, "share no begin"),
    "mixed pair": (
        {"prompt": "a", "chosen": chat("a", "b"), "rejected": "c"},
        None,
        "'chosen' is list .*; expected a text",
    ),
    "other chats": ({"chosen": chat("a", "b"), "rejected": chat("c", "d")}, None, "share no messages"),
    "other prompt": (
        {"prompt": "e", "chosen": chat("a", "b"), "rejected": chat("a", "d")},
        None,
        "the 'prompt' is not in the messages",
    ),
    "chats not answered": (
        {"chosen": [USER], "rejected": [USER]},
        None,
        "share no messages before an answer",
    ),
}


@pytest.mark.parametrize(("row", "stage", "message"), WRONG_FIRST.values(), ids=list(WRONG_FIRST))
def test_a_row_that_fits_nothing_is_named_with_what_was_expected(row, stage, message, tmp_path):
    file = write_lines(tmp_path / "rows.jsonl", [row])
    with pytest.raises(ValueError, match=rf"rows.jsonl:1: .*{message}"):
        chat_data(file, stage)


def test_a_stage_that_is_none_is_refused():
    with pytest.raises(ValueError, match="stage='ptx' is none of 'sft', 'preference', 'prompts'"):
        chat_data([SFT], "ptx")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it has no rows"),
        (b"\xef\xbb\xbf \n\r\n", "it has no rows"),
        (b"[]", "it has no rows"),
        (b'{"prompt": "a"}\n{"prompt": \n', "rows.jsonl:2: no JSON at column 12"),
        (b'[{"prompt": "a"},\n{"prompt"}]', "rows.jsonl:2: no JSON at column 10"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "rows.jsonl:2: this is not UTF-8 text"),
        ('{"prompt": "a"}\n'.encode("utf-16"), "rows.jsonl:1: this is not UTF-8 text"),
    ],
    ids=["empty", "blank", "empty list", "line", "list", "bytes", "UTF-16"],
)
def test_a_file_that_cannot_be_read_is_refused(content, message, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        chat_data(file)


def test_no_rows_and_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match="the list of rows: it has no rows"):
        chat_data([])
    with pytest.raises(ValueError, match="is a folder"):
        chat_data(tmp_path)
    with pytest.raises(ValueError, match=r"row 0 .*this is str 'prompt'"):
        chat_data(SFT)  # one row instead of a list


class FakeTable:
    """What is asked of `pyarrow.parquet.ParquetFile`."""

    def __init__(self, file):
        self.rows = json.loads(file.read_bytes()[4:])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def iter_batches(self):
        return [SimpleNamespace(to_pylist=lambda row=row: [row]) for row in self.rows]


def test_parquet_is_known_by_its_content(tmp_path, monkeypatch):
    file = tmp_path / "rows"
    file.write_bytes(b"PAR1" + json.dumps([SFT, {"prompt": "a", "completion": None}]).encode())
    monkeypatch.setitem(
        sys.modules, "pyarrow", SimpleNamespace(parquet=SimpleNamespace(ParquetFile=FakeTable))
    )
    assert dict(*chat_data(file, max_size=1)) == SFT
    with pytest.raises(ValueError, match=r"rows, row 1 \(the first is 0\): 'completion' missing"):
        chat_data(file)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r'pip install "colossalai\[chat\]"'):
        chat_data(file)


def test_real_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"messages": chat("问", "答"), "n": number} for number in range(3)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert [dict(row) for row in chat_data(tmp_path / "rows.parquet")] == rows


def test_a_subset_is_of_a_name(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps([SFT]))
    with pytest.raises(ValueError, match=r"rows\.json is a file: leave it out"):
        chat_data(tmp_path / "rows.json", subset="part")
    with pytest.raises(ValueError, match=r"subset='part' is for data sets by name, and these are rows"):
        chat_data([SFT], subset="part")


def test_a_name_is_looked_up_in_the_cache_alone(monkeypatch):
    switches = SimpleNamespace(HF_HUB_OFFLINE=False)
    hub = ModuleType("huggingface_hub")
    hub.constants = SimpleNamespace(HF_HUB_OFFLINE=False)

    def load_dataset(name, subset, split):
        assert switches.HF_HUB_OFFLINE
        assert hub.constants.HF_HUB_OFFLINE
        if (name, subset) not in {("some/data", None), ("some/data", "part")}:
            raise ConnectionError("offline")
        return [SFT, SFT]

    library = SimpleNamespace(
        config=switches,
        load_dataset=load_dataset,
        exceptions=SimpleNamespace(DatasetsError=RuntimeError),
    )
    monkeypatch.setitem(sys.modules, "datasets", library)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert [row.place for row in chat_data("some/data")] == [
        f"some/data, row {number} (the first is 0)" for number in range(2)
    ]
    assert len(chat_data("some/data", subset="part")) == 2
    with pytest.raises(ValueError, match=r"no train split of that name and subset 'whole'; nothing is down"):
        chat_data("some/data", subset="whole")
    with pytest.raises(ValueError, match=r"other/data: there is no such file, .*nothing is downloaded"):
        chat_data("other/data")
    assert not switches.HF_HUB_OFFLINE
    assert not hub.constants.HF_HUB_OFFLINE
    with pytest.raises(ValueError, match=r"missing\.jsonl: there is no such file$"):
        chat_data("missing.jsonl")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"other/data: .*the cache of the library datasets cannot be read"):
        chat_data("other/data")
