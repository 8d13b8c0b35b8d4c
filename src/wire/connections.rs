//! The connections of a socket and their pending calls: an idle one is closed to make room for
//! another.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::sync::Notify;

/// The connections of one socket.
#[derive(Debug, Default)]
pub(super) struct Connections {
    all: Mutex<Vec<Weak<Connection>>>,
    /// Counts events, as the order in which connections were used.
    clock: AtomicU64,
    /// A connection has become idle.
    idle: Notify,
}

/// One connection.
#[derive(Debug)]
pub(super) struct Connection {
    connections: Arc<Connections>,
    /// Calls that are pending on it.
    calls: AtomicUsize,
    /// A call has come on it.
    used: AtomicBool,
    /// When it was made, or its last call ended, by the clock.
    since: AtomicU64,
    /// It is to be closed.
    evicted: AtomicBool,
    end: Notify,
}

/// A call that is pending on a connection.
#[derive(Debug)]
pub(super) struct PendingCall(Arc<Connection>);

impl Connections {
    /// A connection that was just made.
    pub(super) fn connection(self: &Arc<Self>) -> Arc<Connection> {
        let connection = Arc::new(Connection {
            connections: Arc::clone(self),
            calls: AtomicUsize::default(),
            used: AtomicBool::default(),
            since: AtomicU64::new(self.tick()),
            evicted: AtomicBool::default(),
            end: Notify::default(),
        });
        let mut all = self.all.lock();
        all.retain(|of| of.strong_count() > 0);
        all.push(Arc::downgrade(&connection));
        connection
    }

    /// Closes the least used idle connection: one that never had a call first, then the one that is
    /// idle for longest. A connection with a pending call, such as the Wait of a pod, is never
    /// closed. False: no connection is idle.
    pub(super) fn evict(&self) -> bool {
        let all = self.all.lock();
        let idle = all.iter().filter_map(Weak::upgrade).filter(|of| of.is_idle());
        let least = idle
            .min_by_key(|of| (of.used.load(Ordering::Relaxed), of.since.load(Ordering::Relaxed)));
        if let Some(least) = &least {
            least.evicted.store(true, Ordering::Relaxed);
            least.end.notify_one();
        }
        least.is_some()
    }

    /// Returns when a connection has become idle since the last time.
    pub(super) async fn idle(&self) {
        self.idle.notified().await;
    }

    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed)
    }
}

impl Connection {
    /// A call comes.
    pub(super) fn begin(self: &Arc<Self>) -> PendingCall {
        self.calls.fetch_add(1, Ordering::AcqRel);
        self.used.store(true, Ordering::Relaxed);
        PendingCall(Arc::clone(self))
    }

    /// Returns when it is to be closed.
    pub(super) async fn evicted(&self) {
        loop {
            self.end.notified().await;
            if self.calls.load(Ordering::Acquire) == 0 {
                return;
            }
            // A call has come meanwhile: another connection is closed.
            self.evicted.store(false, Ordering::Relaxed);
            self.connections.idle.notify_one();
        }
    }

    /// No call is pending on it.
    fn is_idle(&self) -> bool {
        self.calls.load(Ordering::Acquire) == 0 && !self.evicted.load(Ordering::Relaxed)
    }
}

impl Drop for PendingCall {
    fn drop(&mut self) {
        let Connection { connections, calls, since, .. } = &*self.0;
        since.store(connections.tick(), Ordering::Relaxed);
        if calls.fetch_sub(1, Ordering::AcqRel) == 1 {
            connections.idle.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_evicted(of: &Connection) -> bool {
        of.evicted.load(Ordering::Relaxed)
    }

    #[test]
    fn the_least_used_connection_is_evicted_first_and_a_busy_one_never() {
        let connections = Arc::new(Connections::default());
        let [waits, old, fresh, unused] = [(); 4].map(|()| connections.connection());
        let wait = waits.begin();
        drop(old.begin());
        drop(fresh.begin());
        for next in [&unused, &old, &fresh] {
            assert!(!is_evicted(next));
            assert!(connections.evict());
            assert!(is_evicted(next));
        }
        assert!(!connections.evict());
        drop(wait);
        assert!(connections.evict() && is_evicted(&waits));
        drop((waits, old, fresh, unused));
        connections.connection();
        assert_eq!(connections.all.lock().len(), 1);
    }
}
