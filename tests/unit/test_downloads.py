"""`make test-all` downloads what some tests need, and at its end names the downloads that are missing."""

import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.name for path in (ROOT / "scripts").glob("fetch_*.sh"))


def test_make_test_all_runs_all_downloads_before_the_tests_and_names_missing_ones_at_its_end():
    (recipe,) = re.findall(r"^test-all:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    before, after = recipe.split("$(PYTEST)")
    assert sorted(re.findall(r"@scripts/(fetch_\w+\.sh)", before)) == SCRIPTS and "fetch_peers.sh" in SCRIPTS
    assert after.endswith("\t@scripts/missing_downloads.sh\n")


def test_a_missing_download_is_named_with_its_script(tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "build/peers").mkdir(parents=True)

    def named() -> list[str]:
        command = [tmp_path / "scripts/missing_downloads.sh"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return re.findall(r"build/(\w+) is missing, so tests .* skipped; run scripts/fetch_\1\.sh", done.stderr)

    folders = [name.removeprefix("fetch_").removesuffix(".sh") for name in SCRIPTS]
    assert named() == folders, "an empty folder is no download"
    (tmp_path / "build/peers/.requirement").touch()
    assert named() == [folder for folder in folders if folder != "peers"]
