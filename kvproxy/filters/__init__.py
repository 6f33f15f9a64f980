"""The filters of the chain, and what they share.

Request bodies, from the client to the engine: `body_bounds` says why one is refused and how much of all of them is
held. `body_reader` reads one whole. `body` parses what routing needs of it. `body_guard` cuts out what a client may not
say to an engine and puts a tenant's salt in. `alias` replaces the model's name. `request_body` hands the result, or the
stream of an upload, to each attempt.
"""
