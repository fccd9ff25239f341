"""The documentation as text: config keys in commands exist, every page is reachable, the search finds the common words."""

import json
import subprocess
import sys

import pytest
from doc_blocks import ROOT, blocks, mrl_arguments

TAKES_CONFIG = ("train", "sft", "plan", "doctor", "generate", "evaluate", "certify")


def test_there_are_command_blocks():
    assert len(blocks()) > 30


def test_a_block_that_is_not_run_says_what_it_needs():
    for block in blocks():
        assert block.commands, f"{block} is empty"
        assert block.needs is None or len(block.needs) > 5, f"{block}: say what is needed"


@pytest.mark.parametrize("block", [b for b in blocks() if b.needs], ids=str)
def test_config_keys_of_commands_that_are_not_run_exist(block):
    from mrl.config.hydra_entry import is_known_override

    for command in block.commands:
        arguments = mrl_arguments(command)
        if arguments and arguments[0] in TAKES_CONFIG:
            for override in (one for one in arguments[1:] if "=" in one and not one.startswith("-")):
                assert is_known_override(override), f"{block}: {override}"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.extended
def test_no_link_of_the_site_is_broken(site):
    line = [sys.executable, "-m", "linkcheck", "--no-status", "--no-warnings", str(site / "index.html")]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.extended
def test_the_site_makes_no_external_request(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        for attribute in ('src="http', 'rel="stylesheet" href="http', "@import url(http"):
            assert attribute not in text, f"{page.relative_to(site)}: {attribute}"


@pytest.mark.extended
@pytest.mark.parametrize("words", ["out of memory", "hang", "KL", "resume"])
def test_the_search_finds(site, words):
    entries = json.loads((site / "search/search_index.json").read_text())["docs"]
    titles = [one["title"].lower() for one in entries]
    assert any(words.lower() in title for title in titles), f"no heading has {words!r}"
