"""The files in deploy/, as far as they can be looked at without a container runtime or a cluster.

The Helm chart is rendered by a stand-in for the few functions that it uses (`rendered`), and by helm itself where that is
installed; images are not built.
"""

import hashlib
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jinja2
import jsonschema
import pytest
import yaml

from tilewright.cli.root import app as cli
from tilewright.server.metrics import COUNTERS, GAUGES

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "tilewright"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
EVERYTHING = {
    "apiKeySecret": "keys",
    "modelsClaim": "models",
    "autoscaling": {**VALUES["autoscaling"], "enabled": True},
    "serviceMonitor": {"enabled": True, "interval": "5s"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
}
LABELS = "app.kubernetes.io/name: tilewright\napp.kubernetes.io/instance: r"


def rendered(name: str, changed: dict[str, Any]) -> str:
    """A template of the chart: Go's syntax rewritten to Jinja's, for the functions that stand here and no others."""
    text, stack = (CHART / "templates" / name).read_text(), []

    def word(match: re.Match[str]) -> str:
        dash, body = match[1], re.sub(r"\.(Values|Release|Template)\b", r"\1", match[2].strip()).replace("$", "")
        if body.startswith("if "):
            stack.append("if")
            body = re.sub(r"gt \(int (\S+)\) (\d+)", r"\1 > \2", body)
            return f"{{%{dash} {body} %}}"
        if loop := re.fullmatch(r"range name, value := (\S+)", body):
            stack.append("for")
            return f"{{%{dash} for name, value in {loop[1]}.items() %}}"
        if body in ("else", "end"):
            return f"{{%{dash} {'else' if body == 'else' else 'end' + stack.pop()} %}}"
        body = body.replace('include "tilewright.labels" .', "labels")
        body = re.sub(r"include \(print .*\) \.", "''", body)
        body = re.sub(r"toYaml (\S+)", r"\1 | toYaml", body)
        body = re.sub(r"nindent (\d+)", r"nindent(\1)", body)
        body = re.sub(r"add ((?:\S+ ?)+)", lambda found: " + ".join(found[1].split()), body)
        return f"{{{{{dash} {body} }}}}"

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    environment.filters |= {
        "toJson": json.dumps,
        "toYaml": lambda value: yaml.safe_dump(value).strip(),
        "nindent": lambda value, count: "\n" + "\n".join(" " * count + line for line in value.splitlines()),
        "sha256sum": lambda value: hashlib.sha256(value.encode()).hexdigest(),
    }
    source = re.sub(r"\{\{(-?) (.*?) -?\}\}", word, text.replace("{{-", "{{- ").replace("{{-  ", "{{- "))
    return environment.from_string(source).render(Values={**VALUES, **changed}, Release={"Name": "r"}, labels=LABELS)


@pytest.mark.parametrize("changed", [{}, EVERYTHING], ids=["as it is", "with everything"])
def test_the_chart_gives_manifests(changed: dict[str, Any]) -> None:
    found = {}
    for path in sorted((CHART / "templates").glob("*.yaml")):
        document = yaml.safe_load(rendered(path.name, changed))
        if document is not None:
            found[document["kind"]] = document
            assert document["metadata"]["labels"]["app.kubernetes.io/instance"] == "r"
    kinds = {"ConfigMap", "Deployment", "PodDisruptionBudget", "Service"}
    assert found.keys() == (kinds | {"HorizontalPodAutoscaler", "ServiceMonitor"} if changed else kinds)
    pod = found["Deployment"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    values = {**VALUES, **changed}
    config = tomllib.loads(found["ConfigMap"]["data"]["serve.toml"])
    assert config["drain_timeout"] == values["drainSeconds"]
    assert pod["terminationGracePeriodSeconds"] > values["drainSeconds"] + values["preStopSeconds"]
    assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", str(values["preStopSeconds"])]
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    # A server that loads answers 200 there: no limit for how long that may take.
    assert {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness")} == {"/health"}
    assert found["Deployment"]["spec"]["progressDeadlineSeconds"] == values["loadSeconds"] > 600  # Kubernetes' own
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    names = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == names
    selected = found["Service"]["spec"]["selector"]
    assert selected == found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert ("replicas" in found["Deployment"]["spec"]) is not bool(changed), "an autoscaler and a fixed number would fight"
    options = _options("serve")
    assert set(config) <= options
    assert {word[2:].replace("-", "_") for word in container["args"] if word.startswith("--")} <= options


def _options(verb: str) -> set[str]:
    from typer.main import get_command

    return {str(parameter.name) for parameter in get_command(cli).commands[verb].params}  # type: ignore[attr-defined]


def test_the_values_have_a_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(VALUES, schema)
    for wrong in ({"replicas": 0}, {"config": {"max_seqs": {}}}, {"model": ""}, {"preStopSeconds": "10"}, {"loadSeconds": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**VALUES, **wrong}, schema)


def test_helm_agrees() -> None:
    helm = shutil.which("helm")
    if helm is None:
        pytest.skip("no helm on this machine: the chart is only rendered by this test's own stand-in")
    done = subprocess.run([helm, "template", "r", str(CHART)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert subprocess.run([helm, "lint", str(CHART)], capture_output=True).returncode == 0


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "tilewright.json").read_text())
    ours = {f"tilewright_{name}" for name in GAUGES} | {f"tilewright_{name}_total" for name in COUNTERS}
    ours |= {f"tilewright_{name}_seconds_bucket" for name in ("time_to_first_token", "inter_token_latency")}
    ours |= {"tilewright_http_requests_total", "tilewright_jit_compiles_after_ready_total"}
    source = (ROOT / "tilewright" / "server" / "forward_metrics.py").read_text()
    ours |= set(re.findall(r"tilewright_router_\w+", source))
    asked = set()
    for panel in dashboard["panels"]:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            asked |= set(re.findall(r"tilewright_\w+", target["expr"]))
    assert asked <= ours, asked - ours
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    cells = [
        (x, y) for p in dashboard["panels"] for g in [p["gridPos"]] for x in range(g["x"], g["x"] + g["w"]) for y in [g["y"]]
    ]
    assert len(set(cells)) == len(cells), "panels lie on each other"


def test_compose_and_its_files() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    server = compose["services"]["tilewright"]
    assert (DEPLOY / server["build"]["context"] / server["build"]["dockerfile"]).resolve().is_file()
    words = {word[2:].replace("-", "_") for word in server["command"] if word.startswith("--")}
    assert words <= _options("serve")
    assert int(server["stop_grace_period"].removesuffix("s")) > 60
    for service in compose["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (DEPLOY / source).exists(), source
        assert set(service.get("secrets", ())) <= set(compose["secrets"])
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), "nothing is opened to the network without being asked"
    scrape = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"][0]
    assert scrape["static_configs"][0]["targets"] == ["tilewright:8000"]
    for path in (DEPLOY / "grafana" / "provisioning").rglob("*.yaml"):
        assert yaml.safe_load(path.read_text())["apiVersion"] == 1


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_images_are_made_of_what_is_there(name: str) -> None:
    text = (DEPLOY / name).read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    instructions = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    assert {line.split()[0] for line in instructions} <= {
        *("FROM", "ENV", "RUN", "WORKDIR", "COPY", "USER", "VOLUME", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL", "ENTRYPOINT", "CMD")
    }
    for line in instructions:
        if line.startswith("COPY") and "--from" not in line:
            assert all((ROOT / source).exists() for source in line.split()[1:-1]), line
    extras = re.search(r"'\.\[([\w,]+)\]'", text)
    assert extras is not None
    assert set(extras[1].split(",")) <= set(project["optional-dependencies"])
    command = json.loads(next(line for line in instructions if line.startswith("CMD"))[4:])
    assert {word[2:].replace("-", "_") for word in command if word.startswith("--")} <= _options("serve")
    assert any(line.startswith("USER 10001") for line in instructions), "it must not run as root"


def test_the_unit_is_one(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze on this machine")
    text = (DEPLOY / "tilewright.service").read_text()
    assert int(re.search(r"TimeoutStopSec=(\d+)", text)[1]) > 60  # type: ignore[index]
    unit = tmp_path / "tilewright.service"
    unit.write_text(text.replace("/opt/tilewright/bin/tilewright", "/bin/true"))
    done = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_the_package_has_the_pages_that_an_image_needs() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["tilewright"]
    pages = [path.relative_to(ROOT / "tilewright") for path in (ROOT / "tilewright").rglob("page/*") if path.is_file()]
    assert all(any(page.match(pattern) for pattern in data) for page in pages), pages
