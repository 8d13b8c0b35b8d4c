//! The end of a sandbox's pause: waiter, backoff, cleanup retried until it is done.
