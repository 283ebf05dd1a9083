"""What verifiers do with a configuration; see `key_observers`."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from verl.config import Config
from verl.config.keys import replace_values
from verl.verifiers.registry import Assigned, Verifiers, make_verifier
from verl.verifiers.verifier import Sample, VerifierLimit, VerifierSettings


def verdicts(config: Config) -> Any:
    """Scores of a response by verifiers that the settings reach."""
    assigned = [Assigned("max_length", 5), Assigned("gsm8k", "7")]
    verifiers = Verifiers(VerifierSettings(config.verifiers))
    (result,) = verifiers.verify([(Sample("7", None, num_tokens=9), assigned)])
    verifiers.close()
    return result


def judged(config: Config) -> Any:
    """What a judge is asked and what its verdict costs; what a code server is asked and its verdict. Both are
    a server here that counts how many wait at the same time: an answer comes when five do, or after 1.5 s."""
    asked: list[Any] = []
    changed = threading.Condition()
    waiting = most = 0

    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal waiting, most
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with changed:
                waiting += 1
                most = max(most, waiting)
                asked.append((self.path, json.dumps(body)))
                changed.notify_all()
                changed.wait_for(lambda: most > 4, timeout=1.5)
                waiting -= 1
            time.sleep(0.4)  # later than a short timeout allows
            message = {"choices": [{"message": {"content": '{"SCORE": 7}'}}]}
            usage = {"usage": {"prompt_tokens": 9, "completion_tokens": 5}}
            results = {"results": [1, 0, 1][: len(body.get("tests", ""))], "runtimes": [0.1, -1.0, 0.2]}
            results["runtimes"] = results["runtimes"][: len(results["results"])]
            text = json.dumps({**message, **usage, **results}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    judge = url if config.verifiers.judge.base_url is None else f"{url}/other"
    code = url if config.verifiers.code.api_url is None else f"{url}/other"
    blocks = replace_values(config.verifiers, {"judge.base_url": f"{judge}/v1", "code.api_url": code})
    tests = json.dumps(["assert shown()", "assert f(2)", "assert f(3)"])
    assigned = [Assigned("general-quality", None), Assigned("code", tests)]
    samples = [Sample(f"```f = {i}```", None, "assert shown()") for i in range(3)]
    try:
        verifiers = Verifiers(VerifierSettings(blocks))
        results = verifiers.verify([(sample, assigned) for sample in samples])
        results += verifiers.verify([(Sample("f", None), assigned[:1])])
        return results, sorted(asked), most > 4
    except (ValueError, VerifierLimit) as error:
        return str(error)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def patience(config: Config) -> Any:
    """What becomes of a response that takes too long to check."""
    verifier = make_verifier("math", VerifierSettings(config.verifiers))
    (verdict,) = verifier.verify_many([Sample("$9^{9^{9^9}}$", "1")])
    verifier.close()
    return verdict
