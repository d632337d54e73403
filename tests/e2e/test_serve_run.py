"""The same application through Serve's own command line and a config file, on a Redis that stands by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from cluster.lifecycle import kill_tree
from router.client import Client
from tests.support.models import tiny_llama
from tests.support.ports import free_port
from tests.support.redis import running_redis
from tests.support.served import all_serve, is_alive, until


@pytest.mark.parametrize("with_file", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_serve_run(tmp_path: Path, with_file: bool) -> None:
    model = tiny_llama(tmp_path / "tiny")
    port = free_port()
    with running_redis() as redis:
        if with_file:
            target = [str(_config_file(tmp_path, str(model.path), redis.url, port))]
        else:
            target = ["--route-prefix", "/", "cluster.serve.app:build", f"redis={redis.url}", f"model={model.path}"]
            target += [f"router.port={port}", "engine.kv_memory_bytes=33554432", "engine.max_context_tokens=1024"]
        with (tmp_path / "log").open("wb") as log:
            environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
            serve = str(Path(sys.executable).with_name("serve"))
            process = subprocess.Popen([serve, "run", *target], stdout=log, stderr=log, env=environment)
        try:
            with Client(f"127.0.0.1:{port}") as client:
                until(client, all_serve(1), f"a group serves; see {tmp_path / 'log'}")
                assert client.generate_text("a", max_tokens=4, ignore_eos=True, timeout_s=60.0)
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
            process.wait(90)
            _, left = psutil.wait_procs(children, timeout=30)
            assert [one for one in left if is_alive(one)] == []
        finally:
            kill_tree(process.pid)


def _config_file(folder: Path, model: str, redis_url: str, port: int) -> Path:
    settings = {
        "redis": redis_url,
        "model": model,
        "groups": 1,
        "worker_token": "shared by routers and groups",
        "cluster_secret": "equal in every router",
        "engine": {"kv_memory_bytes": 32 << 20, "max_context_tokens": 1024},
        "router": {"port": port},
    }
    application = {"name": "quire", "route_prefix": None, "import_path": "cluster.serve.app:build", "args": settings}
    file = folder / "serve.yaml"
    file.write_text(yaml.safe_dump({"proxy_location": "Disabled", "applications": [application]}))
    return file
