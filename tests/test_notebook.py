"""What a notebook shows of a study and of a result: one is executed by a kernel of its own."""

import re

import nbformat
from nbclient import NotebookClient

CELLS = [
    "import nestfed\n"
    "how = dict(algorithm='fedavg', steps=10, evaluations=1, tune=False, progress=False)\n"
    "nestfed.run('fairness', data='german', out='run', **how)",
    "from nestfed.problems import toys\n"
    "nestfed.simulate(nestfed.make('fedavg', lr=0.1, local_steps=2), toys.quadratics(), rounds=4, progress=False)",
]


def test_a_study_and_a_result_show_tables_and_figures(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    study, result = (cell.outputs[-1].data["text/html"] for cell in notebook.cells)
    assert "FedAvg has the best test EqOpp gap" in study and "<table" in study and "<td>" in study
    assert len(re.findall('src="data:image/png;base64,iVBOR', study)) >= 3
    assert str(tmp_path / "run" / "report.html").endswith(re.findall(r"report: (.*?)</p>", study)[0])
    assert "FedAvg after 4 rounds, 2 clients" in result and "<th>round 4</th>" in result
    assert result.count("<svg") == 1 and "<th>loss</th>" in result
