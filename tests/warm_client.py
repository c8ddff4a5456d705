"""The program of warm_python.interpreter(): sends its arguments, environment and files to the server, and ends as the fork ends.

It runs without `site`, and imports only what the interpreter has built in or loads quickly.
"""

import _socket
import marshal
import os
import sys

_, place, *arguments = sys.argv
connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
connection.connect(place)
request = marshal.dumps((arguments, os.getcwd(), dict(os.environ)))
files = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
connection.sendmsg([len(request).to_bytes(8, "little")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, files)])
connection.sendall(request)
answer = connection.recv(64)
if answer == b"python":
    os.execv(sys.executable, [sys.executable, *arguments])
if not answer:
    sys.exit("the server of tests/warm_python.py has ended")
status = int(answer)
if status < 0:  # a signal
    os.kill(os.getpid(), -status)
os._exit(status)
