//! Wire messages, generated from `protos/`.
