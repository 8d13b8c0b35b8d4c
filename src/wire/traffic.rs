//! What the connections of a socket are used for, so that idle ones make room for others.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::sync::Notify;

/// The connections of one socket.
#[derive(Debug, Default)]
pub(super) struct Traffic {
    connections: Mutex<Vec<Weak<Connection>>>,
    /// Counts events, as the order in which connections were used.
    clock: AtomicU64,
    /// A connection has become idle.
    idle: Notify,
}

/// One connection.
#[derive(Debug)]
pub(super) struct Connection {
    traffic: Arc<Traffic>,
    /// Calls that are pending on it.
    calls: AtomicUsize,
    /// A call has come on it.
    used: AtomicBool,
    /// When it was made, or its last call ended, by the clock.
    since: AtomicU64,
    /// It is to end.
    evicted: AtomicBool,
    end: Notify,
}

/// A call that is pending on a connection.
#[derive(Debug)]
pub(super) struct PendingCall(Arc<Connection>);

impl Traffic {
    /// A connection that was just made.
    pub(super) fn connection(self: &Arc<Self>) -> Arc<Connection> {
        let connection = Arc::new(Connection {
            traffic: Arc::clone(self),
            calls: AtomicUsize::default(),
            used: AtomicBool::default(),
            since: AtomicU64::new(self.tick()),
            evicted: AtomicBool::default(),
            end: Notify::default(),
        });
        let mut connections = self.connections.lock();
        connections.retain(|of| of.strong_count() > 0);
        connections.push(Arc::downgrade(&connection));
        connection
    }

    /// Ends the connection that is missed least: of those without a pending call one that never had
    /// any, then the one that is idle for longest. A connection with the Wait of a pod is never
    /// ended. False: all are in use.
    pub(super) fn evict(&self) -> bool {
        let connections = self.connections.lock();
        let idle = connections.iter().filter_map(Weak::upgrade).filter(|of| of.is_idle());
        let least = idle
            .min_by_key(|of| (of.used.load(Ordering::Relaxed), of.since.load(Ordering::Relaxed)));
        if let Some(least) = &least {
            least.evicted.store(true, Ordering::Relaxed);
            least.end.notify_one();
        }
        least.is_some()
    }

    /// Answers when a connection has become idle since the last time.
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

    /// Answers when it is to make room.
    pub(super) async fn evicted(&self) {
        loop {
            self.end.notified().await;
            if self.calls.load(Ordering::Acquire) == 0 {
                return;
            }
            // A call has come meanwhile: another one makes room.
            self.evicted.store(false, Ordering::Relaxed);
            self.traffic.idle.notify_one();
        }
    }

    /// No call is pending on it.
    fn is_idle(&self) -> bool {
        self.calls.load(Ordering::Acquire) == 0 && !self.evicted.load(Ordering::Relaxed)
    }
}

impl Drop for PendingCall {
    fn drop(&mut self) {
        let Connection { traffic, calls, since, .. } = &*self.0;
        since.store(traffic.tick(), Ordering::Relaxed);
        if calls.fetch_sub(1, Ordering::AcqRel) == 1 {
            traffic.idle.notify_one();
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
        let traffic = Arc::new(Traffic::default());
        let [waits, old, fresh, unused] = [(); 4].map(|()| traffic.connection());
        let wait = waits.begin();
        drop(old.begin());
        drop(fresh.begin());
        for next in [&unused, &old, &fresh] {
            assert!(!is_evicted(next));
            assert!(traffic.evict());
            assert!(is_evicted(next));
        }
        assert!(!traffic.evict());
        drop(wait);
        assert!(traffic.evict() && is_evicted(&waits));
        drop((waits, old, fresh, unused));
        traffic.connection();
        assert_eq!(traffic.connections.lock().len(), 1);
    }
}
