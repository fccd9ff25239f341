"""`mrl completion`: prints a script that completes commands, config keys and their values in a shell."""

import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import get_args

from mrl.config.search_path import group_files, group_names
from mrl.config.validate import key_fields
from mrl.core.code_locations import CONF
from mrl.core.command_names import COMMANDS, SUBCOMMANDS

USAGE = """usage: mrl completion bash|zsh|fish

Prints a script that completes commands, config keys, config groups (such as algorithm=), the files of a group, and the values of
keys that have a fixed set of values.

  bash    echo 'source <(mrl completion bash)' >> ~/.bashrc
  zsh     echo 'source <(mrl completion zsh)' >> ~/.zshrc
          In ~/.zshrc, this line must come after the line that calls compinit.
  fish    mrl completion fish > ~/.config/fish/completions/mrl.fish

The script has the keys of the installed version. After an update of mrl, a new shell has the new keys. For fish, run the command
again.
"""

BASH = """\
_mrl() {
    local word=${COMP_LINE:0:$COMP_POINT} keys=@keys@
    word=${word##*[[:space:]]}  # the word before the cursor; bash splits the words of COMP_WORDS at =
    COMPREPLY=()
    if [[ $COMP_CWORD -eq 1 ]]; then
        COMPREPLY=($(compgen -W @commands@ -- "$word"))
    elif [[ $word == *=* ]]; then
        case ${word%%=*} in
@values@
            *) COMPREPLY=($(compgen -f -- "${word#*=}")) ;;
        esac
    else
        case $COMP_CWORD:${COMP_WORDS[1]} in
@subcommands@
        esac
        compopt -o nospace 2>/dev/null
        COMPREPLY+=($(compgen -W "$keys" -- "$word"))
    fi
}
complete -F _mrl mrl
"""

ZSH = """\
#compdef mrl
_mrl() {
    local word=$words[CURRENT]
    local -a keys=(@keys@)
    if (( CURRENT == 2 )); then
        compadd -- @commands@
    elif [[ $word == *=* ]]; then
        compset -P '*='
        case ${word%%=*} in
@values@
            *) _files ;;
        esac
    else
        case $CURRENT:$words[2] in
@subcommands@
        esac
        compadd -S '' -- $keys
    fi
}
compdef _mrl mrl
"""


def groups() -> dict[str, list[str]]:
    """Return the config groups with the names of their files: experiment -> [gsm8k, quickstart, ...]."""
    return {name: group_files(name, [CONF]) for name in group_names([CONF])}


def values_of_keys() -> dict[str, list[str]]:
    """Return the keys and groups that have a fixed set of values, with their values."""
    values = groups()
    for name, field in key_fields():
        types = [kind for kind in (field.type, *get_args(field.type)) if isinstance(kind, type)]
        if bool in types:
            values[name] = ["true", "false"]
        for kind in types:
            if issubclass(kind, StrEnum):
                values[name] = [str(member) for member in kind]
    return values


def argument_words() -> list[str]:
    """Return the beginnings of all arguments that set a config key (`optim.lr=`) or select a config group (`algorithm=`)."""
    return [f"{name}=" for name in dict.fromkeys([*(name for name, _ in key_fields()), *groups()])]


def bash_script() -> str:
    """Return the script for bash."""
    complete = "COMPREPLY=($(compgen -W {words} -- {word}))"
    values = {
        key: complete.format(words=f"'{' '.join(words)}'", word='"${word#*=}"')
        for key, words in _case_patterns(values_of_keys())
    }
    subcommands = {
        f"2:{name}": complete.format(words=f"'{' '.join(words)}'", word='"$word"')
        for name, words in SUBCOMMANDS.items()
    }
    return _fill(BASH, f"'{' '.join(argument_words())}'", f"'{' '.join(COMMANDS)}'", values, subcommands)


def zsh_script() -> str:
    """Return the script for zsh."""
    values = {key: f"compadd -- {' '.join(words)}" for key, words in _case_patterns(values_of_keys())}
    subcommands = {f"3:{name}": f"compadd -- {' '.join(words)}" for name, words in SUBCOMMANDS.items()}
    return _fill(ZSH, " ".join(argument_words()), " ".join(COMMANDS), values, subcommands)


def fish_script() -> str:
    """Return the script for fish."""
    lines = [
        f"complete -c mrl -n __fish_use_subcommand -f -a {name} -d {_quoted(text)}" for name, text in COMMANDS.items()
    ]
    for name, words in SUBCOMMANDS.items():
        lines.append(f"complete -c mrl -n '__fish_seen_subcommand_from {name}' -f -a {_quoted(' '.join(words))}")
    words = [f"{key}={value}" for key, values in values_of_keys().items() for value in values]
    lines.append(f"complete -c mrl -n 'not __fish_use_subcommand' -a {_quoted(' '.join([*argument_words(), *words]))}")
    return "\n".join([*lines, ""])


def _case_patterns(values: Mapping[str, Sequence[str]]) -> list[tuple[str, Sequence[str]]]:
    """Return pairs (pattern of a shell's case statement, allowed values). Keys with the same values share one pattern."""
    keys: dict[tuple[str, ...], list[str]] = {}
    for key, words in values.items():
        keys.setdefault(tuple(words), []).append(key)
    return [("|".join(names), words) for words, names in keys.items() if words]


def _fill(script: str, keys: str, commands: str, values: Mapping[str, str], subcommands: Mapping[str, str]) -> str:
    for name, cases in (("values", values), ("subcommands", subcommands)):
        script = script.replace(f"@{name}@", "\n".join(f"            {key}) {text} ;;" for key, text in cases.items()))
    return script.replace("@keys@", keys).replace("@commands@", commands)


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}


def main(argv: list[str]) -> int:
    """Entry point of `mrl completion`. Returns the exit status."""
    if len(argv) == 1 and argv[0] in SHELLS:
        sys.stdout.write(SHELLS[argv[0]]())
        return 0
    wants_help = any(word in ("-h", "--help") for word in argv)
    (sys.stdout if wants_help else sys.stderr).write(USAGE)
    return 0 if wants_help else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
