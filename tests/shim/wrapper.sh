#!/bin/sh
# A shim that misbehaves on order: ORDER_FILE holds one word, REAL_SHIM is the shim that it wraps.
# With the order `proxy` the calls of its Task API pass through THIS_TEST, which has orders for each
# of them.
order=$(cat ORDER_FILE)
case " $* " in
*" delete "*)
    echo "$KIT_VARIABLE" >ORDER_FILE.deleted
    [ "$order" = tardy ] && sleep 2
    exec REAL_SHIM "$@"
    ;;
esac
case $order in
exit) echo "cannot continue" >&2; exit 7 ;;
end) exit 0 ;;
hang) exec sleep 1000 ;;
chatter) yes "much too much" >&2 ;;
freeze)
    echo $$ >ORDER_FILE.freezer/cgroup.procs
    echo FROZEN >ORDER_FILE.freezer/freezer.state
    exec sleep 1000
    ;;
proxy) exec THIS_TEST wrap-server REAL_SHIM ORDER_FILE "$@" ;;
*) exec REAL_SHIM "$@" ;;
esac
