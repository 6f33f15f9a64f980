"""A worker that serves nothing: it speaks the line's language, in an interpreter that starts at once.

Its second argument says how it behaves: `serve`, `die` (before it is ready) or `deaf` (to the word that ends it); with
a path it dies, and with `:` before it hangs, before it is ready where there is no such file. None says that it is still
there.
"""

import os
import signal
import socket
import struct
import sys

line = socket.socket(fileno=int(sys.argv[2]))
(length,) = struct.unpack("!Q", line.recv(8, socket.MSG_WAITALL))
line.recv(length, socket.MSG_WAITALL)
if sys.argv[1] == "die" or (sys.argv[1].startswith("/") and not os.path.exists(sys.argv[1])):
    sys.exit(3)
if sys.argv[1].startswith(":") and not os.path.exists(sys.argv[1][1:]):
    line.send(b"aaaa")
    signal.pause()
line.send(b"r")
while word := line.recv(1):
    if sys.argv[1] != "deaf" or word == b"h":
        break
sys.exit(0 if word else 4)
