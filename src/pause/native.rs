//! The native driver.
