//! The native driver on the real kernel. Needs root.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod adoption;
mod exit;
mod fixture;
mod isolation;
mod start;
mod users;
