// Records in a map: added, looked up, a tenth replaced, and all read again. The argument is their number.
import java.util.HashMap;

public class Heap {
    static final class Item {
        final long id;
        final String name;
        final int[] tags;
        Item next;

        Item(long id, String name) {
            this.id = id;
            this.name = name;
            this.tags = new int[] {(int) (id % 7), (int) (id % 11), (int) (id % 13)};
        }
    }

    static long seed = 1;

    static long random(long n) {
        seed = seed * 48271 % 2147483647;
        return seed % n;
    }

    public static void main(String[] args) {
        long count = Long.parseLong(args[0]);
        HashMap<Long, Item> items = new HashMap<>();
        for (long i = 0; i < count; i++) {
            items.put(i, new Item(i, "item-" + i * 2654435761L % 2000000007L));
        }
        for (long i = 0; i < count; i++) {
            items.get(i).next = items.get(i * 48271 % count);
        }
        long sum = 0;
        for (long i = 0; i < count; i++) {
            Item item = items.get(random(random(10) < 9 ? (count + 9) / 10 : count));
            sum = (sum + item.next.id + item.tags[(int) (i % 3)]) % 1000000007L;
            if (i % 10 == 0) {
                long at = random(count);
                Item old = items.get(at);
                Item changed = new Item(old.id, "changed-" + i);
                changed.next = old.next;
                items.put(at, changed);
            }
        }
        long check = 0;
        for (long i = 0; i < count; i++) {
            Item item = items.get(i);
            check = (check * 31 + item.id + item.name.length()) % 1000000007L;
        }
        System.out.println(sum + " " + check);
    }
}
