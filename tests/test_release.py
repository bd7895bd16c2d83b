"""What a release states agrees: versions, citation, workflows, templates."""

import re
import subprocess

import pytest
import yaml

from tests.test_house import ROOT

PROJECT = (ROOT / "pyproject.toml").read_text()
VERSION = re.search(r'^version = "(.*)"$', PROJECT, flags=re.MULTILINE)[1]
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}
STEPS = [step for each in WORKFLOWS.values() for job in each["jobs"].values() for step in job["steps"]]
RUN = [step["run"] for step in STEPS if "run" in step]


def test_the_changelog_is_of_this_version_and_short():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## \[(.*)\]", text, flags=re.MULTILINE)[1] == VERSION
    assert VERSION != "0.1.0" or len(text.splitlines()) <= 30


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0"
    assert str(cited["version"]) == VERSION
    for text in (cited["title"], cited["abstract"], cited["license"], cited["authors"][0]["name"], *cited["keywords"]):
        assert f'"{text}"' in PROJECT


def test_workflows_try_every_version_that_is_promised():
    promised = re.findall(r"Programming Language :: Python :: (3\.\d+)", PROJECT)
    jobs = WORKFLOWS["tests"]["jobs"]
    first = next(step["with"]["python-version"] for step in jobs["ci"]["steps"] if "with" in step)
    tried = [first, *jobs["python"]["strategy"]["matrix"]["python"]]
    assert set(promised) <= set(tried)
    assert f'requires-python = ">={min(tried, key=lambda version: int(version.partition(".")[2]))}"' in PROJECT
    (torch,) = re.findall(r'"torch>=(.*?)"', PROJECT)
    assert f"make test-oldest OLDEST_TORCH={torch}.0" in RUN


@pytest.mark.parametrize("command", RUN)
def test_commands_of_workflows_exist(command):
    words = command.split()
    if words[0] == "make":
        subprocess.run([*words, "--dry-run"], cwd=ROOT, check=True, capture_output=True)
    elif words[0] == "bash":
        assert (ROOT / words[1]).exists()
    elif words[0] == "grep":
        for tag, matches in ((f"v{VERSION}", True), ("v99.0", False)):
            done = subprocess.run(["bash", "-c", command], cwd=ROOT, check=False, env={"GITHUB_REF_NAME": tag})
            assert (done.returncode == 0) is matches
    else:
        assert words[0] in ("pip", "pipx", "python")


def test_only_the_last_step_may_publish():
    jobs = WORKFLOWS["publish"]["jobs"]
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == ["publish"]
    assert all(each["permissions"] == {"contents": "read"} for each in WORKFLOWS.values())
    assert jobs["publish"]["needs"] == "build"


def test_hooks_are_what_make_runs():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in repository["hooks"]:
        assert hook["entry"].replace(".venv/bin", "$(BIN)").removesuffix(" --fix") in MAKEFILE


@pytest.mark.parametrize("path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem)
def test_issue_forms(path):
    form = yaml.safe_load(path.read_text())
    assert form["name"]
    assert form["description"]
    fields = form["body"]
    assert len({field["id"] for field in fields}) == len(fields)
    for field in fields:
        assert field["type"] == "textarea"
        assert field["attributes"]["label"]
    named = re.findall(r"\b(?:docs|examples)/[\w./-]+\w", path.read_text())
    assert named
    assert all((ROOT / each).exists() for each in named)
