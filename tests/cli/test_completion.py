"""The completion scripts, in the shells themselves: verbs, flags, and file names where nothing else fits."""

import contextlib
import shutil
import subprocess

import pytest

from detonation.cli.command import run_command

LINES = ["tr", "train --sch", "compare quick-lm --schem", "train rec"]
EXPECTED = [["train"], ["--scheme"], ["--schemes"], ["recipes/"]]
BASH = """
source $1
complete -p detonation >&2
shift
for line in "$@"; do
    read -ra COMP_WORDS <<< "detonation $line"
    [[ $line != *' ' ]] || COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
    _detonation
    echo "${COMPREPLY[@]-}"
done
"""
FISH = """
source $argv[1]
for line in $argv[2..]
    echo (complete --do-complete "detonation $line" | string replace --regex '\t.*' '')
end
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """The scripts by shell, in a folder that has a folder `recipes`."""
    folder = tmp_path_factory.mktemp("completion")
    (folder / "recipes").mkdir()
    for shell in ("bash", "zsh", "fish"):
        with (folder / shell).open("w") as file, contextlib.redirect_stdout(file):
            assert run_command(["--completion", shell]) == 0
    return {shell: folder / shell for shell in ("bash", "zsh", "fish")}


def completed(shell, script, program):
    command = [shell, "-c", program, *(["bash"] if shell == "bash" else []), str(script), *LINES]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=script.parent)
    return [sorted(line.split()) for line in done.stdout.splitlines()], done.stderr


def test_bash_completes_verbs_and_flags_and_falls_back_to_files(scripts):
    found, registered = completed("bash", scripts["bash"], BASH)
    assert found == [*EXPECTED[:3], []]
    assert "-o default" in registered  # where it offers nothing, bash offers file names


def test_fish_completes_verbs_flags_and_files(scripts):
    if not shutil.which("fish"):
        pytest.skip("fish is not installed")
    found, _ = completed("fish", scripts["fish"], FISH)
    assert found[:3] == EXPECTED[:3] and "recipes/" in found[3]  # among what is spelled alike


def test_zsh_takes_the_script_from_fpath(scripts):
    if not shutil.which("zsh"):
        pytest.skip("zsh is not installed")
    folder = scripts["zsh"].parent / "fpath"
    folder.mkdir()
    shutil.copy(scripts["zsh"], folder / "_detonation")
    program = "fpath=($0 $fpath); autoload -Uz compinit; compinit -u -D; echo $_comps[detonation]"
    command = ["zsh", "-f", "-c", program, str(folder)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "_detonation\n"
    assert scripts["zsh"].read_text().count(" or ['__TYRO_COMPLETE_FILES__']") == 1


def test_another_shell_is_refused_in_one_line(capsys):
    assert run_command(["--completion", "tcsh"]) == 2
    assert capsys.readouterr().err == "error: --completion takes bash, zsh, fish, not 'tcsh'\n"
