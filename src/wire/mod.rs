//! The wire: gRPC and ttrpc skins over one handler.
