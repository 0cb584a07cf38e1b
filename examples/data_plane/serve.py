"""The data plane: the ledger and a storage unit in one process. python serve.py DIRECTORY"""

import sys

from headrace.dataplane.serve import serve_ledger, until_stopped
from headrace.wire import ipc_address
from headrace_storage.shared_memory import SharedMemoryStorage

storage = SharedMemoryStorage(SharedMemoryStorage.Settings())
until_stopped(serve_ledger(ipc_address(sys.argv[1], "ledger"), storage, capacity=256 << 20))
