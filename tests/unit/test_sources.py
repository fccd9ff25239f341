"""Prompt sources: column names, saved data sets, mixtures, named test sets, and user-defined data sets."""

import pickle

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mrl.config.schema import DataConfig
from mrl.data.prompts import PromptConstraints, PromptDataset
from mrl.data.sources import PromptSource, test_sources, train_sources
from mrl.data.synthetic_tasks import make_doubling_task
from mrl.data.tokenizer import ChatTemplate

test_sources.__test__ = False  # pytest would take this function of mrl for a test

ROWS = [
    {"question": "1+2=", "answer": 3, "level": "one", "tests": [1, 2]},
    {"question": "2*2=", "answer": 4.5, "level": "two"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources") / "made"
    make_doubling_task(folder)
    return folder / "model"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "plain.jsonl"
    path.write_bytes(b"\n".join(map(orjson.dumps, ROWS)))
    return str(path)


def load(model, sources, chat=None):
    data = PromptDataset.load(sources, model, PromptConstraints(40, 32, chat or ChatTemplate()))
    assert not data.report.omitted, data.report.omitted
    return data


def train(**keys):
    return train_sources(DataConfig(**keys))


def test_named_columns_need_no_conversion(model, file):
    columns = {"prompt": "question", "ground_truth": "answer", "extra_info": ["level"]}
    data = load(model, train(train=[file], columns=columns))
    assert data.messages(0) == [{"role": "user", "content": "1+2="}]
    assert [data.ground_truth(row) for row in (0, 1)] == ["3", "4.5"], "numbers become text"
    assert data.extra_info(1) == {"level": "two"} and data.data_source(0) == "plain"


def test_a_ground_truth_may_be_a_list_or_an_object_or_absent(model, tmp_path):
    rows = [{"prompt": "1", "truth": [1, 2]}, {"prompt": "1", "truth": {"target": ["a"]}}]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows)))
    data = load(model, train(train=[str(tmp_path / "a.jsonl")], columns={"ground_truth": "truth"}))
    assert [data.ground_truth(0), data.ground_truth(1)] == [[1, 2], {"target": ["a"]}]
    data = load(model, train(train=[str(tmp_path / "a.jsonl")], columns={"ground_truth": None}))
    assert data.ground_truth(0) == ""


def test_large_integers_stay_exact(model, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "1", "truth": 123456789012345678901234567890}')
    data = load(model, train(train=[str(tmp_path / "a.jsonl")], columns={"ground_truth": "truth"}))
    assert data.ground_truth(0) == "123456789012345678901234567890"


def test_a_column_set_by_the_user_must_exist_in_every_row(model, file):
    sources = train(train=[file], columns={"prompt": "question", "ground_truth": "answer", "data_source": "lvl"})
    report = PromptDataset.load(sources, model, PromptConstraints(40, 32)).report
    assert report.num_bad == 2 and report.omitted[0].reason.endswith("did you mean 'level'?")


def test_a_system_message_is_added_to_prompts_without_one(model, tmp_path):
    own = [{"role": "system", "content": "7"}, {"role": "user", "content": "1"}]
    rows = [{"prompt": "1", "ground_truth": ""}, {"prompt": own, "ground_truth": ""}]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows)))
    data = load(model, train(train=[str(tmp_path / "a.jsonl")], system="8", columns={"ground_truth": "ground_truth"}))
    assert data.decode([data.encode(0), data.encode(1)]) == ["81", "71"]


def test_a_saved_data_set_is_read_like_a_file(model, tmp_path):
    from datasets import Dataset, DatasetDict

    saved = Dataset.from_list(ROWS).shuffle(seed=1).select([0])  # saving applies this order
    DatasetDict(train=saved).save_to_disk(str(tmp_path / "saved"))
    columns = {"prompt": "question", "ground_truth": "answer"}
    data = load(model, train(train=[str(tmp_path / "saved/train")], columns=columns))
    assert len(data) == 1 and data.messages(0)[0]["content"] == saved[0]["question"] and data.data_source(0) == "train"
    with pytest.raises(ValueError, match=r"saved: holds the splits train; name one of them: .*saved/train"):
        load(model, train(train=[str(tmp_path / "saved")], columns=columns))
    with pytest.raises(
        ValueError, match=r"a folder without state.json; expected a .jsonl or .parquet file, or a folder"
    ):
        load(model, train(train=[str(tmp_path)]))


def test_a_damaged_saved_data_set_says_so(model, tmp_path):
    from datasets import Dataset

    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "saved/data-00000-of-00001.arrow").write_bytes(b"no")
    with pytest.raises(ValueError, match="saved: not a readable saved data set"):
        load(model, train(train=[str(tmp_path / "saved")]))


def test_a_mixture_has_a_weight_and_columns_for_each_source(model, file, tmp_path):
    (tmp_path / "b.jsonl").write_bytes(orjson.dumps({"ask": "5", "answer": "five"}))
    mixture = {
        "plain": {"files": [file], "columns": {"prompt": "question"}, "weight": 2},
        "asked": {"files": str(tmp_path / "b.jsonl"), "columns": {"prompt": "ask"}, "system": "0"},
    }
    data = load(model, train(mixture=mixture, columns={"ground_truth": "answer"}))
    assert data.rows_by_source() == {"plain": range(2), "asked": range(2, 3)}
    assert [data.data_source(row) for row in range(3)] == ["plain", "plain", "asked"]
    assert data.decode([data.encode(2)]) == ["05"] and data.ground_truth(2) == "five"
    rows = next(data.stream(300, seed=0, shuffle=True))
    assert (rows < 2).sum() == 200


def test_held_out_sets_keep_their_names(model, file):
    columns = {"prompt": "question", "ground_truth": "answer"}
    listed = load(model, test_sources(DataConfig(test=[file], columns=columns)))
    assert listed.rows_by_source() == {"": range(2)}
    named = load(model, test_sources(DataConfig(test_sets={"a": [file], "b": {"files": [file]}}, columns=columns)))
    assert named.rows_by_source() == {"a": range(2), "b": range(2, 4)} and named.data_source(3) == "b"
    assert test_sources(DataConfig()) == []


class Squares:
    """A user-defined data set."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> dict:
        if row == 4:
            raise KeyError("four is lost")
        return {"prompt": f"{row}*{row}=", "ground_truth": row * row, "extra_info": {"row": row}}


class NoRows:
    """An object that is not a data set."""


def listed(count: int) -> list[dict]:
    return [Squares(count)[row] for row in range(count)]


HERE = "tests.unit.test_sources" if __name__.startswith("tests") else __name__


@pytest.mark.parametrize("target", ["Squares", "listed"])
def test_a_user_defined_data_set_is_read(model, target):
    data = load(model, train(dataset={"_target_": f"{HERE}.{target}", "count": 3}))
    assert [data.ground_truth(row) for row in range(3)] == ["0", "1", "4"]
    assert data.extra_info(2) == {"row": 2} and data.data_source(0) == "dataset"
    mixed = load(model, train(mixture={"squares": {"dataset": {"_target_": f"{HERE}.{target}", "count": 2}}}))
    assert mixed.data_source(0) == "squares"


def halves(count: int) -> list[dict]:
    rows = listed(count)
    rows[1]["prompt"], rows[2]["ground_truth"] = "1+\ud800=", "\ud800"
    return rows


def test_a_lone_surrogate_in_a_user_row_makes_it_a_bad_row(model):
    sources = train(dataset={"_target_": f"{HERE}.halves", "count": 4})
    data = PromptDataset.load(sources, model, PromptConstraints(40, 32))
    assert [(bad.row, bad.column) for bad in data.report.omitted] == [(1, "prompt"), (2, "ground_truth")]
    assert all("not valid Unicode" in bad.reason for bad in data.report.omitted)
    assert data.row_numbers.tolist() == [0, 3]


def test_a_row_for_which_a_user_data_set_raises_is_a_bad_row(model):
    data = PromptDataset.load(
        train(dataset={"_target_": f"{HERE}.Squares", "count": 6}), model, PromptConstraints(40, 32)
    )
    (bad,) = data.report.omitted
    assert (bad.row, data.report.rows, data.report.kept) == (4, 6, 5) and "four is lost" in str(bad)
    assert str(bad).startswith(f"{HERE}.Squares, row 4")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "data.train must name at least one"),
        ({"train": ["a"], "mixture": {"m": {"files": ["b"]}}}, "data.train and data.mixture are set, but exactly one"),
        ({"train": ["a"], "columns": {"promt": "q"}}, "data.columns.promt: .*did you mean 'prompt'"),
        ({"train": ["a"], "columns": {"prompt": None}}, "columns.prompt=None: expected the name of a column"),
        ({"train": ["a"], "columns": {"ground_truth": 3}}, "columns.ground_truth=3: expected the name"),
        ({"mixture": {"m": {"fils": ["b"]}}}, "data.mixture.m.fils: unknown key; did you mean 'files'"),
        ({"mixture": {"m": {"weight": 1}}}, "data.mixture.m: expected either files or a dataset"),
        (
            {"mixture": {"m": {"files": ["b"], "weight": 0}}},
            "data.mixture.m.weight=0: expected a number greater than 0",
        ),
        ({"mixture": {"m": {"files": ["b"], "weight": float("nan")}}}, "m.weight=nan: expected a number"),
        ({"mixture": {"m": {"files": [1]}}}, "data.mixture.m=.*: expected a list of files"),
        ({"dataset": {"_target_": "nowhere.at.all"}}, "data.dataset._target_=nowhere.at.all: cannot be imported"),
        ({"dataset": {"_target_": f"{HERE}.Squares", "cont": 1}}, "data.dataset.cont: .*did you mean 'count'"),
        ({"dataset": {"_target_": f"{HERE}.Squares", "count": 0}}, "data.dataset: .*Squares has no rows"),
        (
            {"mixture": {"m": {"files": ["b"], "columns": {"promt": "q"}}}},
            "data.mixture.m.columns.promt: unknown key",
        ),
        ({"dataset": {"_target_": f"{HERE}.NoRows"}}, "NoRows gives NoRows, which has no __len__"),
        ({"dataset": {"_target_": f"{HERE}.listed", "count": -1}}, "data.dataset: .*listed has no rows"),
        ({"dataset": {"_target_": f"{HERE}.listed", "count": "x"}}, "data.dataset: .*listed failed: TypeError"),
    ],
)
def test_a_wrong_source_is_refused_before_anything_is_read(keys, message):
    with pytest.raises(ValueError, match=message):
        train(**keys)


def test_a_pickled_data_set_does_not_contain_its_tokenizer(model, file):
    data = load(model, train(train=[file], columns={"prompt": "question", "ground_truth": "answer"}))
    assert data.decode([data.encode(0)]) == ["1+2="]
    sent = pickle.dumps(data)
    assert len(sent) < 4000
    again = pickle.loads(sent)
    assert again.encode(1) == data.encode(1) and again.decode([again.encode(1)]) == ["2*2="]
    assert again.fingerprint == data.fingerprint


def test_the_fingerprint_depends_on_the_prompts_only(model, tmp_path):
    def fingerprint(*texts):
        pq.write_table(pa.table({"prompt": texts, "ground_truth": [""] * len(texts)}), tmp_path / "a.parquet")
        source = train(train=[str(tmp_path / "a.parquet")], columns={"ground_truth": "ground_truth"})
        return load(model, source).fingerprint

    assert fingerprint("1", "2") == fingerprint("1", "2")
    assert len({fingerprint("1", "2"), fingerprint("2", "1"), fingerprint("12"), fingerprint("1", "2", "3")}) == 4


def test_a_chat_template_and_its_arguments_can_be_set(model, file, tmp_path):
    (tmp_path / "t.jinja").write_text("{% if thinking %}+{% endif %}{{ messages[-1]['content'] }}-")
    columns = {"prompt": "question", "ground_truth": "answer"}
    source = train(train=[file], columns=columns)

    def text(**args):
        data = load(model, source, ChatTemplate(str(tmp_path / "t.jinja"), args))
        return data.decode([data.encode(0)])

    assert text() == ["1+2=-"] and text(thinking=True) == ["+1+2=-"] and text(thinking=False) == ["1+2=-"]
    with pytest.raises(ValueError, match=r"data.template_args.thinkin: not a variable .*did you mean 'thinking'"):
        text(thinkin=True)
    with pytest.raises(
        ValueError, match=r"data.template_args.tokenize: not a variable of the chat template; leave it out"
    ):
        text(tokenize=True)
    (tmp_path / "t.jinja").write_text("one\n{% if %}")
    with pytest.raises(ValueError, match=r"data.chat_template=.*t.jinja: line 2: "):
        text()
    with pytest.raises(ValueError, match=r"data.chat_template=none.jinja: no such file"):
        load(model, source, ChatTemplate("none.jinja"))


def test_supervised_rows_follow_the_same_template(model, tmp_path):
    from mrl.data.supervised_dataset import SftDataset

    (tmp_path / "t.jinja").write_text("{{ messages[-1]['content'] }}-")
    (tmp_path / "a.jsonl").write_bytes(b"\n" + orjson.dumps({"prompt": "1", "response": "2"}))
    chat = ChatTemplate(str(tmp_path / "t.jinja"))
    assert len(SftDataset.load(tmp_path / "a.jsonl", model, 9, chat).prompts[0]) == 2
    with pytest.raises(ValueError, match=r"row 1: prompt and response have 4 tokens"):
        SftDataset.load(tmp_path / "a.jsonl", model, 3, chat)


def test_sources_can_be_made_in_code(model, file):
    from mrl.data.columns import Columns

    assert len(load(model, [PromptSource((file,), Columns(prompt="question", ground_truth="answer"))])) == 2
