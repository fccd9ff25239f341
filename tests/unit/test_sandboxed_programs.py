"""Ordinary programs do in the sandbox what they do outside of it: the filter refuses none of their system calls."""

from pathlib import Path

import numpy as np
import pytest
from test_sandbox_filter import outside  # noqa: F401

from mrl.rewards import sandbox
from mrl.rewards.sandbox import SandboxLimits, run

pytestmark = pytest.mark.skipif(sandbox.unavailable_reason() is not None, reason=str(sandbox.unavailable_reason()))

ORDINARY = {
    "sorted input": ("print(sorted(map(int, input().split())))", "[1, 2, 3]\n"),
    "many lines": ("import sys\nprint(len(sys.stdin.readlines()))", "1\n"),
    "json and re": ("import json, re\n"
    "print(json.dumps({k: len(v) for k, v in [('a', re.findall('b+', 'bb b'))]}))", '{"a": 2}\n'),
    "threads": (
        "import threading\nout = []\nts = [threading.Thread(target=out.append, args=(i,), name=f't{i}') for i in range(4)]\n"
        "[t.start() for t in ts]; [t.join() for t in ts]\nprint(sorted(out))",
        "[0, 1, 2, 3]\n",
    ),
    "locks and queues": (
        "import queue, threading\nq = queue.Queue()\nt = threading.Thread(target=lambda: [q.put(i) for i in range(3)])\n"
        "t.start()\nprint([q.get(timeout=30) for _ in range(3)])",
        "[0, 1, 2]\n",
    ),
    "thread pool": (
        "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as p: print(list(p.map(abs, [-1, 2])))",
        "[1, 2]\n",
    ),
    "asyncio": (
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(0.01)\n    return await asyncio.to_thread(abs, x)\n"
        "async def main(): return await asyncio.wait_for(asyncio.gather(f(-1), f(2)), 30)\nprint(asyncio.run(main()))",
        "[1, 2]\n",
    ),
    "temporary files": (
        "import tempfile\nwith tempfile.TemporaryFile('w+') as f:\n"
        "    f.write('x'); f.flush(); f.seek(0); print(f.read())", "x\n",
    ),
    "copies and flushes": (
        "import os, shutil, pathlib\nopen('a', 'w').write('b')\nwith open('a') as f: os.fsync(f.fileno())\n"
        "shutil.copyfile('a', 'c')\nprint(pathlib.Path('c').read_text(), sorted(p.name for p in pathlib.Path('.').iterdir()))",
        "b ['a', 'c']\n",
    ),
    "mapped file": (
        "import mmap\nopen('a', 'wb').write(bytes(8192))\nwith open('a', 'r+b') as f, mmap.mmap(f.fileno(), 0) as m:\n"
        "    m[:2] = b'hi'\nprint(open('a', 'rb').read(2))",
        "b'hi'\n",
    ),
    "database in memory": (
        "import sqlite3\nd = sqlite3.connect(':memory:')\nd.execute('create table t(x)')\nd.execute('insert into t values (3)')\n"
        "print(d.execute('select x from t').fetchall())",
        "[(3,)]\n",
    ),
    "alarm": (
        "import signal, time\ndef f(*_): raise TimeoutError\nsignal.signal(signal.SIGALRM, f)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.05)\n"
        "try: time.sleep(60)\nexcept TimeoutError: print('late')",
        "late\n",
    ),
    "socket pair": (
        "import selectors, socket\na, b = socket.socketpair()\nb.setblocking(False)\na.sendall(b'x')\n"
        "s = selectors.DefaultSelector()\n"
        "s.register(b, selectors.EVENT_READ)\ns.select(30)\nprint(b.recv(5))",
        "b'x'\n",
    ),
    "logging and csv": (
        "import csv, io, logging, sys\nlogging.basicConfig(stream=sys.stdout, format='%(message)s')\nlogging.warning('w')\n"
        "print(list(csv.reader(io.StringIO('a,b'))))",
        "w\n[['a', 'b']]\n",
    ),
    "random numbers, hashes and times": (
        "import datetime, hashlib, os, platform, random, secrets, time, uuid, zoneinfo\n"
        "random.seed(1); uuid.uuid4(); secrets.token_hex()\n"
        "time.perf_counter(); datetime.datetime.now(); os.cpu_count(); platform.machine(); os.times();\n"
        "print(hashlib.sha256(b'').hexdigest()[:4], len(os.urandom(4)))",
        "e3b0 4\n",
    ),
    "terminal and limits": (
        "import os, resource, shutil, sys\nresource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))\n"
        "print(sys.stdout.isatty(), shutil.get_terminal_size().columns, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0)",
        "False 80 True\n",
    ),
    "recursion and big integers": (
        "import sys\nsys.setrecursionlimit(20000)\nf = lambda n: 1 if n < 2 else n * f(n - 1)\nprint(len(str(f(500))))",
        "1135\n",
    ),
}  # fmt: skip


@pytest.mark.extended_after(5)
@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_programs_work(name):
    source, expected = ORDINARY[name]
    outcome = run(source, "3 1 2\n", SandboxLimits(wall_s=60.0))
    assert (outcome.reason, outcome.stdout) == ("ok", expected), outcome


def test_numpy_works(outside):  # noqa: F811
    source = (
        "import numpy as np\nrng = np.random.default_rng(0)\na = rng.normal(size=(64, 64))\n"
        "print(np.allclose(np.linalg.inv(a) @ a, np.eye(64)), np.sort([3, 1, 2]).tolist(), np.fft.fft([1, 0]).real.tolist())\n"
        "np.save('a.npy', a)\nprint(np.load('a.npy', mmap_mode='r').shape)"
    )
    packages = str(Path(np.__file__).parents[1])
    outcome = run(source, "", SandboxLimits(wall_s=120.0, cpu_s=60, memory_bytes=8 << 30), path=(packages,))
    assert outcome.stdout == "True [1, 2, 3] [1.0, 1.0]\n(64, 64)\n", outcome
