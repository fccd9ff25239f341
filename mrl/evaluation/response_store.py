"""The output folder of `mrl generate`: parquet files with responses, and _generate.json with the settings."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any, Self

from parallel.durable_files import fsync_path

# File with the settings, the digest of the prompts and, after the generation has finished, its totals. Readers of folders of
# parquet files, such as pandas.read_parquet, ignore names that begin with an underscore.
MANIFEST = "_generate.json"
OUTPUT_FILES = "responses_*.parquet"  # `*` is replaced by the index of the file

Row = dict[str, Any]  # one response: column of `response_schema` -> value
JsonObject = dict[str, Any]  # settings or totals of a generation, as in _generate.json


class ResponseStore:
    """The output folder of one generation. A later process with the same settings adds the missing files.

    As a context manager, the store holds an exclusive lock on the folder. Only the holder of the lock may write.
    """

    def __init__(self, folder: str | Path, settings: JsonObject) -> None:
        """Check the folder without changing it.

        Args:
            settings: everything that determines the responses, as a JSON object: name of a setting -> its value.

        Raises:
            ValueError: the folder belongs to a generation with other settings (the message names up to five differences),
                or it contains other files.
        """
        self.folder = Path(folder)
        # The conversion to JSON and back gives the settings the types that a manifest on disk has.
        self.settings: JsonObject = json.loads(json.dumps(settings))
        self._lock: int | None = None  # file descriptor of the locked folder
        self._check()

    def _check(self) -> None:
        manifest = _read_manifest(self.folder)
        if manifest is None:
            if self.folder.exists() and any(self.folder.iterdir()):
                raise ValueError(
                    f"generate.output={self.folder}: the folder contains other files; name a new folder, or empty this one."
                )
            return
        before = manifest["settings"]
        changed = [
            f"{key} was {before.get(key)!r} and is {self.settings.get(key)!r}"
            for key in {**before, **self.settings}
            if before.get(key) != self.settings.get(key)
        ]
        if changed:
            raise ValueError(
                f"generate.output={self.folder}: was started with other settings ({'; '.join(changed[:5])}); name another "
                "folder, or remove this one to start over."
            )

    def check_prompts(self, prompts_digest: str) -> None:
        """Compare the digest of the prompts with the stored digest. If none is stored, store it. The caller must hold the lock.

        Raises:
            ValueError: the folder belongs to a generation with other prompts.
        """
        manifest = _read_manifest(self.folder)
        assert manifest, "__enter__ writes the manifest"
        if manifest.get("prompts_digest") not in (None, prompts_digest):
            raise ValueError(
                f"generate.output={self.folder}: was started with other prompts from the same files: the chat template, the "
                "tokenizer, data.max_prompt_tokens or a user-defined data set has changed; undo the change, or name another "
                "folder."
            )
        self._write_manifest(prompts_digest=prompts_digest)

    @property
    def finished(self) -> JsonObject | None:
        """The totals of the generation; None: the generation is not finished."""
        manifest = _read_manifest(self.folder)
        return manifest["finished"] if manifest else None

    def __enter__(self) -> Self:
        """Lock the folder and remove unfinished files. Raises ValueError if another process has locked the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.__exit__()
            raise ValueError(
                f"generate.output={self.folder}: another process writes there; wait until it ends."
            ) from None
        except OSError:  # the file system has no locks: the user must not start two writers
            pass
        for unfinished in self.folder.glob("*.unfinished"):
            unfinished.unlink()
        if not (self.folder / MANIFEST).is_file():
            self._write_manifest(prompts_digest=None, finished=None)
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def has(self, index: int) -> bool:
        """Return whether the output file with this index exists."""
        return self._path(index).is_file()

    def write(self, index: int, rows: list[Row]) -> None:
        """Write the output file with this index atomically."""
        import pyarrow as pa  # the import takes seconds
        import pyarrow.parquet as pq

        path = self._path(index)
        unfinished = path.with_name(path.name + ".unfinished")
        table = pa.Table.from_pylist([row | dict(parts=parts_column(row)) for row in rows], schema=response_schema())
        pq.write_table(table, unfinished)
        fsync_path(unfinished)
        unfinished.rename(path)

    def finish(self, totals: JsonObject) -> None:
        """Mark the generation as finished. All output files must exist."""
        self._write_manifest(finished=totals)

    def _path(self, index: int) -> Path:
        return self.folder / OUTPUT_FILES.replace("*", f"{index:06d}")

    def _write_manifest(self, **changed: Any) -> None:
        """Set fields of the manifest: `prompts_digest`, or the totals `finished`. Other fields keep their values."""
        new = self.folder / (MANIFEST + ".unfinished")
        manifest = (_read_manifest(self.folder) or {}) | dict(settings=self.settings) | changed
        new.write_text(json.dumps(manifest, indent=1) + "\n")
        fsync_path(new)
        new.rename(self.folder / MANIFEST)


def read_responses(folder: str | Path) -> tuple[JsonObject, list[Row]]:
    """Return the settings of a finished generation, and all its responses in order.

    Raises:
        ValueError: the folder contains no generation, or the generation is unfinished, was written by another version
            of mrl, or has missing or added files.
    """
    import pyarrow.parquet as pq

    folder = Path(folder)
    manifest = _read_manifest(folder)
    if manifest is None:
        raise ValueError(f"{folder}: no {MANIFEST} there; expected a folder that `mrl generate` wrote.")
    if manifest["finished"] is None:
        raise ValueError(
            f"{folder}: the generation is not finished; run the same `mrl generate` with generate.output={folder} to continue it."
        )
    tables = {path: pq.read_table(path) for path in sorted(folder.glob(OUTPUT_FILES))}
    for path, table in tables.items():
        if missing := set(response_schema().names) - set(table.column_names):
            raise ValueError(
                f"{path}: has no column {', '.join(sorted(missing))}; another version of mrl wrote it. Generate again."
            )
    rows = [row for table in tables.values() for row in table.to_pylist()]
    for row in rows:
        row["parts"] = None if row["parts"] is None else {part["name"]: part["value"] for part in row["parts"]}
    if len(rows) != manifest["finished"]["responses"]:
        raise ValueError(
            f"{folder}: found {len(rows)} responses, but {MANIFEST} says {manifest['finished']['responses']}; files were "
            "removed or added. Generate again."
        )
    return manifest["settings"], rows


def _read_manifest(folder: Path) -> JsonObject | None:
    path = folder / MANIFEST
    return json.loads(path.read_text()) if path.is_file() else None


def response_schema() -> Any:
    """Return the pyarrow schema of the output files, which have one row per response.

    The schema is fixed, because pyarrow cannot infer the type of a column that has only nulls in one file.
    """
    import pyarrow as pa

    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    part = pa.struct([("name", pa.string()), ("value", pa.float64())])
    return pa.schema(
        [
            ("set", pa.string()),  # name of the set in data.test_sets; empty for data.test
            ("file", pa.string()),  # name of the data file that contains the prompt
            ("file_number", pa.int32()),  # index of the data file among all held-out data files, from 0
            ("row", pa.int64()),  # index of the prompt's row in the data file, from 0
            ("sample", pa.int32()),  # index of the response among the responses to its prompt, from 0
            ("data_source", pa.string()),  # results are summarized per data source
            ("prompt", pa.list_(message)),
            ("response", pa.string()),  # without special tokens
            ("token_ids", pa.list_(pa.int32())),  # with the end-of-sequence token, unless the response is truncated
            ("num_tokens", pa.int32()),
            ("logprobs", pa.list_(pa.float32())),  # null if generate.logprobs is false
            ("finish_reason", pa.string()),  # "length" if the token limit truncated the response, otherwise "stop"
            ("ground_truth", pa.string()),  # text, or JSON if ground_truth_is_json is true
            ("ground_truth_is_json", pa.bool_()),
            ("extra_info", pa.string()),  # JSON
            ("ability", pa.string()),  # empty if the row of the data has no ability
            ("style", pa.string()),
            ("score", pa.float64()),  # null if generate.score is false
            ("failure", pa.string()),  # why the reward gave no score; null if it gave a score
            ("parts", pa.list_(part)),  # parts of the score; a list, because `datasets` cannot read the type map
        ]
    )


def parts_column(row: Row) -> list[dict[str, Any]] | None:
    """Return the parts of a score (name -> value) as the column `parts` stores them: a list of {name, value}."""
    parts = row["parts"]
    return None if parts is None else [dict(name=name, value=value) for name, value in parts.items()]
