#!/usr/bin/env python3
"""An emulated BMC: the parts of Redfish that `sumac flash --redfish` uses, with the faults of a script.

    bmc.py FOLDER

FOLDER has script.json, cert.pem and key.pem. Prints two ports as JSON, of the service and of another host, and ends with
its stdin. seen.jsonl and other.jsonl get a line for each request to either.

Own, because no maintained emulator has what is needed: sushy-tools 2.2 has neither a multipart push nor a firmware
inventory, and its only task has always been completed; DMTF's mockup server is not on PyPI, and its resources are files,
which no update changes. Requests are parsed by Python's own modules (http.server, email), so that a mistake in the
command's requests is not repeated here.

Script: user, push, simple, protocols, enabled, max_image_bytes, parts (of the inventory, {name: version}), after (the
same once the task is completed), tasks (what each look at the task shows: an object of a task, a status, "drop" or
"hang"; the last one repeats), answers ({path: {status, body, location, raw, endless, hang}}, instead of its own), and
accept (the answer to an update, likewise).
"""

import base64
import email
import email.policy
import hashlib
import http.server
import json
import pathlib
import ssl
import sys
import threading

FOLDER = pathlib.Path(sys.argv[1])
SCRIPT = json.loads((FOLDER / "script.json").read_text())
UPDATES = "/redfish/v1/UpdateService"
INVENTORY = f"{UPDATES}/FirmwareInventory"
PUSH = f"{UPDATES}/update-multipart"
SIMPLE = f"{UPDATES}/Actions/UpdateService.SimpleUpdate"
TASK = "/redfish/v1/TaskService/Tasks/7"
OVER = threading.Event()
LOCK = threading.Lock()


class State:
    looks = 0
    parts = SCRIPT.get("parts", {})


def error(text, advice=None):
    info = {"MessageId": "Base.1.8.GeneralError", "Message": text, "Resolution": advice or "None."}
    return {"error": {"code": "Base.1.8.GeneralError", "message": "See @Message.ExtendedInfo.", "@Message.ExtendedInfo": [info]}}


def link(path):
    return {"@odata.id": path}


def task(shown):
    return {"@odata.type": "#Task.v1_4_3.Task", "@odata.id": TASK, "Id": "7", "TaskStatus": "OK", **shown}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    record = "seen.jsonl"

    def log_message(self, *_):
        pass

    def note(self, **more):
        line = {"method": self.command, "path": self.path, "authorization": self.headers.get("Authorization"), **more}
        with LOCK, open(FOLDER / self.record, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def answer(self, status=200, body=None, location=None, raw=None, endless=False, hang=False):
        if hang:
            OVER.wait()
            self.close_connection = True
            return
        data = raw.encode() if raw is not None else b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        if location:
            port = self.server.other_port
            self.send_header("Location", location.replace("OTHER", f"https://127.0.0.1:{port}"))
        if endless:
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while not OVER.is_set():
                self.wfile.write(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
            return
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def is_known(self):
        given = self.headers.get("Authorization", "")
        if given == "Basic " + base64.b64encode(SCRIPT["user"].encode()).decode():
            return True
        self.answer(401, error("The user is not known."))
        return False

    def do_GET(self):
        self.note()
        if self.path == "/image.bfb":
            return self.answer_file()
        if not self.is_known():
            return None
        if self.path in SCRIPT.get("answers", {}):
            return self.answer(**SCRIPT["answers"][self.path])
        if self.path == TASK:
            return self.look()
        resource = self.resource()
        return self.answer(404, error("There is no such resource.")) if resource is None else self.answer(body=resource)

    def resource(self):
        if self.path == "/redfish/v1/":
            return {"Product": "Emulated BMC", "RedfishVersion": "1.17.0", "UpdateService": link(UPDATES)}
        if self.path == UPDATES:
            offer = {"ServiceEnabled": SCRIPT.get("enabled", True), "FirmwareInventory": link(INVENTORY)}
            if SCRIPT.get("push"):
                offer["MultipartHttpPushUri"] = SCRIPT["push"].replace("OTHER", f"https://127.0.0.1:{self.server.other_port}")
            if SCRIPT.get("simple"):
                action = {"target": SIMPLE, "TransferProtocol@Redfish.AllowableValues": SCRIPT.get("protocols", ["HTTPS"])}
                offer["Actions"] = {"#UpdateService.SimpleUpdate": action}
            if "max_image_bytes" in SCRIPT:
                offer["MaxImageSizeBytes"] = SCRIPT["max_image_bytes"]
            return offer
        if self.path == INVENTORY:
            # Two pages.
            names = sorted(State.parts)
            return {"Members": [link(f"{INVENTORY}/{name}") for name in names[:1]], "Members@odata.nextLink": f"{INVENTORY}?$skip=1"}
        if self.path == f"{INVENTORY}?$skip=1":
            return {"Members": [link(f"{INVENTORY}/{name}") for name in sorted(State.parts)[1:]]}
        name = self.path.removeprefix(f"{INVENTORY}/")
        return {"Id": name, "Version": State.parts[name]} if name in State.parts else None

    def look(self):
        tasks = SCRIPT.get("tasks", [])
        shown = tasks[min(State.looks, len(tasks) - 1)]
        State.looks += 1
        if shown == "drop":
            self.close_connection = True
            return None
        if shown == "hang":
            return self.answer(hang=True)
        if isinstance(shown, int):
            return self.answer(shown, error("Gone, or busy."))
        if shown.get("TaskState") == "Completed":
            State.parts = SCRIPT.get("after", State.parts)
        return self.answer(body=task(shown))

    def answer_file(self):
        data = (FOLDER / "served").read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self):
        if SCRIPT.get("slow"):
            # Without reading its body, until the client gives up.
            self.note()
            return self.answer(hang=True)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        known = self.is_known()
        if not known:
            return None
        if self.path == PUSH:
            self.note(**self.parts_of(body))
        else:
            self.note(request=json.loads(body))
        if "accept" in SCRIPT:
            return self.answer(**SCRIPT["accept"])
        return self.answer(202, task({"TaskState": "New"}), location=f"{TASK}/Monitor")

    def parts_of(self, body):
        """The parts of a form, as Python's parser of MIME finds them."""
        head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
        form = email.message_from_bytes(head + body, policy=email.policy.HTTP)
        found = {}
        for part in form.iter_parts():
            name, data = part.get_param("name", header="content-disposition"), part.get_payload(decode=True)
            if name == "UpdateParameters":
                found["parameters"] = json.loads(data)
                found["parameters_type"] = part.get_content_type()
            else:
                found[name] = hashlib.sha256(data).hexdigest()
                found["file"] = part.get_filename()
        return found


class Other(Handler):
    """Another host, which must get nothing."""

    record = "other.jsonl"


def start(handler, context):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    # Handshakes in the connections' threads.
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    server.handle_error = lambda *_: None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def main():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(FOLDER / "cert.pem", FOLDER / "key.pem")
    other = start(Other, context)
    service = start(Handler, context)
    service.other_port = other.other_port = other.server_port
    print(json.dumps([service.server_port, other.server_port]), flush=True)
    sys.stdin.read()
    OVER.set()


main()
