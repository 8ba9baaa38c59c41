"""Messages between the ranks of a pipeline: point to point, with tags, asynchronous.

`transport` states the interface (`isend`, `irecv`, `wait`); `native_transport` implements it over
shared memory and sockets, `horovod_transport` over Horovod alone. `rendezvous` brings the ranks
together, `process_sets` makes Horovod's groups, `collectives` gives its calls a time limit. `watch`
knows which ranks are alive, and `ending` has a process end well when one is not.
"""
