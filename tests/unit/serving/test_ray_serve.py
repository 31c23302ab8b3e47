"""Ray Serve on a cluster that others use: their applications stay, one replica is killed, and too much is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from serving_runs import free_port

pytest.importorskip("ray.serve", exc_type=ImportError)  # the extra ray[serve]
pytestmark = pytest.mark.slow
PROGRAM = """
import json, os, signal, sys, threading, time
from concurrent.futures import ThreadPoolExecutor

import httpx, ray
from ray import serve

import torchlake as tl

model, port, result, shared = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4] == "shared"
ray.init(num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
found = {}

if shared:
    @serve.deployment(ray_actor_options={"num_cpus": 0})
    class Other:
        def __call__(self, request):
            return "other"

    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(Other.bind(), name="other", route_prefix="/other")

base = f"http://127.0.0.1:{port}" + ("/torchlake" if shared else "")

def ask(client):
    return client.post(f"{base}/predict", json={"inputs": "good film"})

def use():
    try:
        with httpx.Client(trust_env=False, timeout=60) as client:
            ends = time.monotonic() + 120
            while True:
                try:
                    if client.get(f"{base}/health").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                assert time.monotonic() < ends
                time.sleep(0.2)
            found["answer"] = ask(client).json()
            found["route"] = client.post(f"{base}/invocations", json={"instances": ["good film", ""]}).json()
            large = {"inputs": ["good " * 60] * 60}
            def flood(_):
                with httpx.Client(trust_env=False, timeout=60) as own:
                    return own.post(f"{base}/predict", json=large).status_code
            with ThreadPoolExecutor(24) as pool:
                found["flood"] = sorted(set(pool.map(flood, range(96))))
            if not shared:
                import psutil
                own = psutil.Process().children(recursive=True)
                replicas = [one for one in own if "ServeReplica:torchlake" in " ".join(one.cmdline())]
                found["replicas"] = len(replicas)
                replicas[0].kill()
                statuses = [ask(client).status_code for _ in range(50)]
                found["after a kill"] = [statuses.count(200), statuses[-1]]
    except BaseException as error:
        found["error"] = repr(error)
    os.kill(os.getpid(), signal.SIGTERM)

thread = threading.Thread(target=use)
thread.start()
options = tl.serving.ServeOptions(host="127.0.0.1", port=port, max_requests=4, drain_timeout=5)
found["status"] = tl.serve(model, engine=tl.Ray(processes=1 if shared else 2), options=options)
thread.join()
found["left"] = sorted(serve.status().applications)
if shared:
    found["other"] = httpx.get(f"http://127.0.0.1:{port}/other", trust_env=False).text
else:
    found["proxies"] = len(serve.status().proxies)
json.dump(found, open(result, "w"))
"""


@pytest.mark.parametrize("cluster", ["own", "shared"])
def test_applications_of_others_stay_and_too_many_requests_are_refused(
    tiny_model: Path, tmp_path: Path, cluster: str
) -> None:
    result = tmp_path / "found.json"
    command = [sys.executable, "-c", PROGRAM, str(tiny_model), str(free_port()), str(result), cluster]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert result.exists(), done.stderr[-3000:]
    found = json.loads(result.read_text())
    assert "error" not in found, (found, done.stderr[-3000:])
    assert [one["label"] for one in found["answer"]] != []
    assert [row["error"] for row in found["route"]["predictions"]] == [None, "null_input"]
    assert found["flood"][:2] == [200, 429]  # then 503: Ray itself
    assert found["status"] == 0
    if cluster == "shared":
        assert (found["left"], found["other"]) == (["other"], "other")
    else:
        assert found["replicas"] == 2
        assert found["after a kill"][1] == 200
        assert found["after a kill"][0] >= 40
        assert (found["left"], found["proxies"]) == ([], 0)
