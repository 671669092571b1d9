"""An HTTP service of one model in the wire format of text-embeddings-inference.

`Service(settings).start()` loads the model; `make_app(service)` is an ASGI application.
"""

from attmemo.serve.settings import Settings

__all__ = ["Settings"]
