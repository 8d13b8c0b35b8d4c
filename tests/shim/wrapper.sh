#!/bin/sh
# A shim that misbehaves on order: ORDER_FILE holds one word, REAL_SHIM is the shim that it wraps. Calls other than the server's are
# passed on.
case " $* " in
*" start "* | *" delete "*) exec REAL_SHIM "$@" ;;
esac
case $(cat ORDER_FILE) in
exit) echo "cannot go on" >&2; exit 7 ;;
end) exit 0 ;;
hang) exec sleep 1000 ;;
chatter) yes "much too much" >&2 ;;
*) exec REAL_SHIM "$@" ;;
esac
