"""The example of another project, as its workflow runs it: from the wheel alone, in an environment and folder of its
own."""

import os
import shutil
import subprocess
import venv
from pathlib import Path

PROJECT = Path(__file__).parent.parent / "examples" / "project"
WORKFLOW = Path(".github", "workflows", "test.yml")


def commands(workflow):
    return [line.split("run:", 1)[1].strip() for line in workflow.splitlines() if line.lstrip(" -").startswith("run:")]


def test_workflow_of_another_project_passes_and_fails_with_its_program(tmp_path):
    project = shutil.copytree(PROJECT, tmp_path / "project")
    (project / "wheels").symlink_to(os.environ["SUMAC_TEST_WHEELS"])
    venv.create(tmp_path / "venv", with_pip=True)
    environment = {**os.environ, "PATH": f"{tmp_path / 'venv' / 'bin'}:{os.environ['PATH']}"}
    steps = commands((project / WORKFLOW).read_text())
    assert len(steps) == 2

    def run(step):
        return subprocess.run(step, cwd=project, env=environment, shell=True, capture_output=True, text=True)

    for step in steps:
        ended = run(step)
        assert ended.returncode == 0, f"{step}\n{ended.stdout}{ended.stderr}"
    assert "2 passed" in ended.stdout
    # What the fixture starts is this program.
    program = project / "mean.py"
    program.write_text(program.read_text().replace("totals[0] / totals[1]", "totals[0]"))
    ended = run(steps[-1])
    assert ended.returncode == 1 and "2 failed" in ended.stdout


def test_guide_has_the_workflow_and_the_test():
    guide = (PROJECT.parents[2] / "docs" / "python.md").read_text()
    for file in (WORKFLOW, "test_mean.py"):
        lines = [line for line in (PROJECT / file).read_text().splitlines() if not line.startswith(("#", '"""'))]
        assert "\n".join(lines).strip() in guide, f"{file} differs"
