"""A server for ssh that runs commands as the user who runs the tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncssh


async def _run_command(process: asyncssh.SSHServerProcess[bytes]) -> None:
    child = await asyncio.create_subprocess_shell(
        process.command or "",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    ended = asyncio.create_task(child.wait())
    try:
        await process.redirect(stdout=child.stdout, stderr=child.stderr)
        await asyncio.wait([ended, asyncio.create_task(process.wait_closed())], return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            process.exit(ended.result())
    finally:
        # what OpenSSH's server does when a client goes away or sends a signal
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await ended


@contextlib.contextmanager
def ssh_server(folder: Path) -> Iterator[dict[str, Any]]:
    """Serve on a free port of the loopback, and give what `asyncssh.connect` needs to be let in, by key only."""
    host_key, user_key = asyncssh.generate_private_key("ssh-ed25519"), asyncssh.generate_private_key("ssh-ed25519")
    user_key.write_private_key(str(folder / "user"))
    user_key.write_public_key(str(folder / "authorized"))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> asyncssh.SSHAcceptor:
        return await asyncssh.listen(
            "127.0.0.1",
            0,
            server_host_keys=[host_key],
            authorized_client_keys=str(folder / "authorized"),
            process_factory=_run_command,
            encoding=None,
        )

    async def stop(server: asyncssh.SSHAcceptor) -> None:
        server.close()
        await server.wait_closed()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=10)

    try:
        server = asyncio.run_coroutine_threadsafe(start(), loop).result()
        port = server.get_port()
        known = f"[127.0.0.1]:{port} {host_key.export_public_key().decode()}"
        (folder / "known_hosts").write_text(known)
        try:
            yield {
                "port": port,
                "username": "slackring",
                "client_keys": [str(folder / "user")],
                "known_hosts": str(folder / "known_hosts"),
            }
        finally:
            asyncio.run_coroutine_threadsafe(stop(server), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
