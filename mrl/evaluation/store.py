"""The folder of `mrl generate`: parquet files that appear whole, and generate.json, which says what they were made with."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any, Self

from models.conversion.partial_folder import sync

MANIFEST = "generate.json"
FILES = "responses_*.parquet"

Row = dict[str, Any]


class Store:
    """One generation's files. A later process with the same settings adds what is missing; as a context it writes alone."""

    def __init__(self, folder: str | Path, settings: Row) -> None:
        """`settings` (JSON, flat): all that decides the responses.

        Raises: ValueError where the folder was begun with other settings, or holds something else; names the difference.
        """
        self.folder = Path(folder)
        self.settings: Row = json.loads(json.dumps(settings))  # as the manifest will read back
        self._lock: int | None = None
        self._check()

    def _check(self) -> None:
        manifest = _manifest(self.folder)
        if manifest is None:
            if self.folder.exists() and any(self.folder.iterdir()):
                raise ValueError(
                    f"generate.output={self.folder}: the folder holds other files; name a new one, or empty it."
                )
            return
        before = manifest["settings"]
        changed = [
            f"{key}={before.get(key)!r} then, {self.settings.get(key)!r} now"
            for key in {**before, **self.settings}
            if before.get(key) != self.settings.get(key)
        ]
        if changed:
            raise ValueError(
                f"generate.output={self.folder}: was begun with other settings ({'; '.join(changed[:5])}); name another folder, "
                "or remove it to start over."
            )

    def bind(self, questions: str) -> None:
        """Note what is asked, as a digest; in a folder that was begun before, compare it. To be called within the context.

        Raises: ValueError where the folder was begun with other prompts.
        """
        manifest = _manifest(self.folder)
        assert manifest, "written on entering the context"
        if manifest.get("questions") not in (None, questions):
            raise ValueError(
                f"generate.output={self.folder}: was begun with other prompts, though of the same files: chat template, "
                "tokenizer, data.max_prompt_tokens or a user's data set has changed; change it back, or name another folder."
            )
        self._write_manifest(questions=questions)

    @property
    def finished(self) -> Row | None:
        """The totals of a finished generation."""
        manifest = _manifest(self.folder)
        return manifest["finished"] if manifest else None

    def __enter__(self) -> Self:
        """Begin, or go on. Raises ValueError where another process writes the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.__exit__()
            raise ValueError(f"generate.output={self.folder}: another process writes there; wait for it.") from None
        except OSError:  # a file system without locks: two writers are then the user's to avoid
            pass
        for left in self.folder.glob("*.unfinished"):
            left.unlink()
        if not (self.folder / MANIFEST).is_file():
            self._write_manifest(questions=None, finished=None)
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def has(self, number: int) -> bool:
        """Whether file `number` is there."""
        return self._path(number).is_file()

    def write(self, number: int, rows: list[Row]) -> None:
        """Add file `number`: whole, or not at all."""
        import pyarrow as pa  # seconds, with the driver's other start
        import pyarrow.parquet as pq

        path = self._path(number)
        unfinished = path.with_name(path.name + ".unfinished")
        pq.write_table(pa.Table.from_pylist(rows, schema=schema()), unfinished)
        sync(unfinished)
        unfinished.rename(path)

    def finish(self, totals: Row) -> None:
        """All files are there."""
        self._write_manifest(finished=totals)

    def _path(self, number: int) -> Path:
        return self.folder / FILES.replace("*", f"{number:06d}")

    def _write_manifest(self, **changed: Any) -> None:
        """`questions` (their digest) and `finished` (the totals); what is not given stays."""
        new = self.folder / (MANIFEST + ".unfinished")
        manifest = (_manifest(self.folder) or {}) | dict(settings=self.settings) | changed
        new.write_text(json.dumps(manifest, indent=1) + "\n")
        sync(new)
        new.rename(self.folder / MANIFEST)


def read(folder: str | Path) -> tuple[Row, list[Row]]:
    """Settings and all rows of a finished generation, in order; raises ValueError unless it is one."""
    import pyarrow.parquet as pq

    folder = Path(folder)
    manifest = _manifest(folder)
    if manifest is None:
        raise ValueError(f"{folder}: no {MANIFEST} there; expected a folder that `mrl generate` wrote.")
    if manifest["finished"] is None:
        raise ValueError(
            f"{folder}: the generation was stopped; the same `mrl generate` with generate.output={folder} goes on."
        )
    tables = {path: pq.read_table(path) for path in sorted(folder.glob(FILES))}
    for path, table in tables.items():
        if missing := set(schema().names) - set(table.column_names):
            raise ValueError(f"{path}: has no column {', '.join(sorted(missing))}; it was not written by this version.")
    rows = [row for table in tables.values() for row in table.to_pylist(maps_as_pydicts="strict")]
    if len(rows) != manifest["finished"]["responses"]:
        raise ValueError(
            f"{folder}: {len(rows)} responses are there, {MANIFEST} says {manifest['finished']['responses']}; files were removed "
            "or added. Generate again."
        )
    return manifest["settings"], rows


def _manifest(folder: Path) -> Row | None:
    path = folder / MANIFEST
    return json.loads(path.read_text()) if path.is_file() else None


def schema() -> Any:
    """Columns of the files, as a pyarrow schema: the same in every file, whatever its rows hold."""
    import pyarrow as pa

    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    return pa.schema(
        [
            ("set", pa.string()),  # name in data.test_sets; empty: of data.test
            ("file", pa.string()),  # of the prompt
            ("file_number", pa.int32()),  # its place among all held-out files, from 0
            ("row", pa.int64()),  # of the prompt in its file, from 0
            ("sample", pa.int32()),  # which response to it, from 0
            ("data_source", pa.string()),
            ("prompt", pa.list_(message)),
            ("response", pa.string()),  # without special tokens
            ("token_ids", pa.list_(pa.int32())),  # end of sequence included
            ("num_tokens", pa.int32()),
            ("logprobs", pa.list_(pa.float32())),  # null unless asked for
            ("finish_reason", pa.string()),  # stop, or length: cut
            ("ground_truth", pa.string()),  # JSON where the next column says so, else text
            ("ground_truth_is_json", pa.bool_()),
            ("extra_info", pa.string()),  # JSON
            ("score", pa.float64()),  # null where no reward was asked for
            ("failure", pa.string()),  # why the reward gave nothing
            ("parts", pa.map_(pa.string(), pa.float64())),
        ]
    )
